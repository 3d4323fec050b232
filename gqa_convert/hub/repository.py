"""The repository on the Hub: what the user asks of it, its state, and the upload."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from gqa_convert.checkpoint.formats import is_weight_file
from gqa_convert.errors import InterruptedRunError, OptionError, PublishError, UploadError
from gqa_convert.runtime.messages import some

LICENSE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}")
"""Identifiers of licences on the Hub."""
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class PublishOptions:
    """Where a checkpoint goes, and what its folder does not say of it.

    Attributes:
        repo_id: of the form org/name.
        private: create a new repository as private.
        results: files of evaluate.
        base_model: id on the Hub of the model that it was made from.
        license: identifier of the Hub.

    Raises:
        OptionError: a name is malformed.
    """

    repo_id: str
    private: bool = False
    results: Sequence[Path] = ()
    base_model: str | None = None
    license: str | None = None

    def __post_init__(self) -> None:
        if "/" not in self.repo_id or not is_hub_id(self.repo_id):
            raise _malformed("--repo-id", self.repo_id, "org/name")
        if self.base_model is not None and not is_hub_id(self.base_model):
            raise _malformed("--base-model", self.base_model, "org/name")
        if self.license is not None and not LICENSE_ID.fullmatch(self.license):
            raise _malformed("--license", self.license, "apache-2.0, llama2 or other")

    @property
    def url(self) -> str:
        """The address of the repository."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.repo_id}"

    @property
    def name(self) -> str:
        """The repository's name without its owner."""
        return self.repo_id.partition("/")[2]


def is_hub_id(name: str) -> bool:
    """Whether a repository on the Hub may have this id, with its owner or without."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _malformed(option: str, value: str, example: str) -> OptionError:
    return OptionError(f"{option} {value!r} is no name on the Hub: write it like {example}")


class Repository:
    """A repository, accessed with the user's login.

    Args:
        options: where it is.
        token: of the login; it is removed from every message.

    Raises:
        PublishError: there is no token.
    """

    def __init__(self, options: PublishOptions, token: str | None) -> None:
        from huggingface_hub import HfApi

        if token is None:
            raise PublishError(
                "you are not logged in to the Hub: run `hf auth login` with a write token, "
                "or try --dry-run"
            )
        self._options = options
        self._token = token
        self._api = HfApi()
        # None: as the organisation has it
        self._private = options.private or None

    def read(self, names: Sequence[str]) -> bool | None:
        """Return whether the repository is private; None for a new one that will be as its
        organisation has it.

        Args:
            names: files that it may get. Other weights in it could be loaded in place of them.

        Raises:
            PublishError: it is public and --private was given, or it holds other weights.
            UploadError: the Hub can't be reached.
        """
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._explained("nothing was sent: try again later"):
            try:
                info = self._api.model_info(self._options.repo_id, timeout=_TIMEOUT_SECONDS)
            except RepositoryNotFoundError:
                return self._private
        if self._private and not info.private:
            raise PublishError(
                f"{self._options.url} exists and is public: "
                "make it private on the Hub, or leave --private out"
            )
        # transformers could load another model's weights in place of these
        there = {item.rfilename for item in info.siblings or []}
        other = sorted(filter(is_weight_file, there.difference(names)))
        if other:
            raise PublishError(
                f"{self._options.url} holds weights of another model, {some(other)}: "
                "delete them there, or name another repository"
            )
        return bool(info.private)

    def upload(self, folder: Path, names: Sequence[str], message: str) -> str:
        """Create the repository if it is missing, and upload files that the Hub does not have yet.
        The client sends and the Hub keeps large files by their SHA-256.

        Returns:
            The commit.

        Raises:
            UploadError: the Hub can't be reached or refuses, and the same command resumes the
                upload.
        """
        repo_id = self._options.repo_id
        with self._explained("run the same command again: uploaded files are not sent twice"):
            self._api.create_repo(repo_id, private=self._private, exist_ok=True)
            # names may hold what a pattern takes for a wildcard
            patterns = [escape(name) for name in names]
            commit = self._api.upload_folder(
                repo_id=repo_id, folder_path=folder, allow_patterns=patterns, commit_message=message
            )
        return str(commit.oid)

    @contextmanager
    def _explained(self, advice: str) -> Iterator[None]:
        """A context in which errors of the client become one line."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            yield
        except InterruptedRunError:  # raised by a signal, wherever the program is
            raise InterruptedRunError(
                f"stopped during a request to {self._options.url}; {advice}"
            ) from None
        except Exception as problem:
            status = problem.response.status_code if isinstance(problem, HfHubHTTPError) else None
            if status in (401, 403, 404):
                advice = "log in with `hf auth login` and a token that may write there"
            text = str(problem).replace(self._token, "***")
            # without passwords and signatures in addresses
            text = re.sub(r"(https?://)(?:[^\s/@']*@)?([^\s?']*)(?:\?[^\s']*)?", r"\1\2", text)
            raise UploadError(
                f"the Hub refused {self._options.repo_id} ({text}); {advice}"
            ) from None
