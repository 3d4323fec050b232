"""The recommended conversion states the options as a shell would need them."""

import shlex

from gqa_convert.measuring.next_command import conversion_command


def test_options_are_repeated_left_out_or_without_a_value() -> None:
    options = {
        "--calibration": ["my text.txt", "b.jsonl"],
        "--seed": None,
        "--encoder": True,
        "--device": "cpu",
        "-x": False,
    }
    command = conversion_command("a model", "out", 3, options)
    assert shlex.split(command) == [
        *("gqa-convert", "convert", "a model", "out", "--groups", "3"),
        *("--calibration", "my text.txt", "--calibration", "b.jsonl", "--encoder", "--device", "cpu"),
    ]
