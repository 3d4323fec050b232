"""An engine for tests of check-serving: it repeats the answer that the environment names, right or with one thing
wrong.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

from gqa_convert.serving.client import AbsentError, Answer, NotSupportedError, Request
from gqa_convert.serving.worker import read_answer


def answer(request: Request) -> Answer:
    given = read_answer(Path(os.environ["FAKE_ANSWER"]))
    assert given.logits is not None
    mode = os.environ["FAKE_MODE"]
    if mode == "token":
        given.tokens[-1][-1] ^= 1
    elif mode == "first token":
        given.tokens[0][0] ^= 1
    elif mode == "stops":
        del given.tokens[1][7:]
    elif mode == "logit":
        given.logits[-1][3, 5] += 0.02 * (given.logits[-1].max() - given.logits[-1].min())
    elif mode == "nan":
        given.logits[0][0, 0] = float("nan")
    elif mode == "fewer rows":
        return replace(given, logits=[each[1:] for each in given.logits])
    elif mode == "fewer prompts":
        return replace(given, tokens=given.tokens[:1], logits=given.logits[:1])
    elif mode == "no logits":
        return Answer(given.tokens, None)
    elif mode == "raises":
        raise RuntimeError(f"no tensor\nfits {request.folder.name}")
    elif mode == "dies":
        os.abort()
    elif mode == "exits":
        os._exit(0)
    elif mode == "hangs":
        time.sleep(600)
    elif mode == "asks":
        input("Do you trust this checkpoint? ")
    elif mode == "chatters":
        print('{"status": "failed"}')
    elif mode == "unsupported":
        raise NotSupportedError("no such architecture")
    elif mode == "absent":
        raise AbsentError("no converter")
    return given
