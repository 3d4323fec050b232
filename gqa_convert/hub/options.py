"""What the user asks of `publish`."""

import re
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.errors import OptionError, PublishError
from gqa_convert.hub.licenses import LICENSE_ID

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_BRANCH = re.compile(r"\w[\w-]*([./][\w-]+)*", re.ASCII)


@dataclass(frozen=True)
class PublishOptions:
    """Where a checkpoint goes, and what its folder does not say of it.

    Attributes:
        repo_id: of the form org/name.
        revision: a branch, or `refs/pr/N`; None for the main branch.
        private: create a new repository as private.
        create_pr: open a pull request instead of committing.
        results: files of evaluate, benchmark and lm-eval.
        base_model: id on the Hub of the model that it was made from.
        license: identifier of the Hub.
        datasets: ids on the Hub of the training data.
        overwrite_card: rename a README.md that the user wrote to README.md.old, rather than refuse.
    """

    repo_id: str
    revision: str | None = None
    private: bool = False
    create_pr: bool = False
    results: tuple[Path, ...] = ()
    base_model: str | None = None
    license: str | None = None
    datasets: tuple[str, ...] = ()
    overwrite_card: bool = False

    @property
    def is_pull_request(self) -> bool:
        return self.create_pr or (self.revision or "").startswith("refs/")

    @property
    def name(self) -> str:
        """The repository's name without its owner."""
        return self.repo_id.rsplit("/", 1)[-1]


def check_options(options: PublishOptions) -> None:
    """Check what can be checked without a network.

    Raises:
        PublishError, OptionError: a name is malformed, or options contradict each other.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(options.repo_id)
        valid = options.repo_id.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise PublishError(
            f"--repo-id {options.repo_id!r} is not a repository name: write org/name with letters, digits, '-', '_' and '.'"
        )
    if options.revision is not None and not _BRANCH.fullmatch(options.revision):
        raise PublishError(
            f"--revision {options.revision!r} is not a branch name: write letters, digits, '-', '_', '.' and '/'"
        )
    if options.create_pr and options.revision:
        raise PublishError(
            "--create-pr opens a pull request against the main branch: leave --revision out; to add to an open one, give --revision refs/pr/N"
        )
    for option, name in [("--base-model", options.base_model), *(("--dataset", name) for name in options.datasets)]:
        if name is not None and not HUB_ID.fullmatch(name):
            raise OptionError(f"{option} {name!r} is not an id of the Hub: write it like org/name")
    if options.license is not None and not LICENSE_ID.fullmatch(options.license):
        raise OptionError(
            f"--license {options.license!r} is not a licence of the Hub: give an identifier such as apache-2.0, llama2 or other"
        )
