"""Files of one model on a hub, fetched whole where they are small and by ranges where they are not."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from kvist.errors import BadFile, InputError, KvistError, UnknownModel
from kvist.spec.json_file import shown


class Unreachable(Exception):
    """The hub was not reached, or did not answer; the message says why, in one line."""


@dataclass(frozen=True, kw_only=True)
class HubFiles:
    """What a revision of a model holds.

    Attributes:
        repo: ``organisation/name``.
        commit: that is read, whatever the revision was called.
        sizes: bytes of each file by name; None where the hub does not say.
    """

    repo: str
    commit: str
    sizes: Mapping[str, int | None]
    _totals: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def open(cls, repo: str, revision: str | None) -> "HubFiles":
        """Ask the hub for the list of files.

        Raises:
            ModuleNotFoundError: ``huggingface_hub`` is not installed.
            Unreachable: the hub does not answer.
            UnknownModel: it has no such model or revision.
            InputError: the model is gated.
        """
        from huggingface_hub import HfApi

        with _in_one_line(repo, revision):
            info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_timeout())
        sizes = {file.rfilename: file.size for file in info.siblings or ()}
        return cls(repo=repo, commit=info.sha or revision or "main", sizes=sizes)

    def at(self, name: str) -> str:
        """What messages call a file."""
        return f"{self.repo}@{self.commit[:12]}{'/' if name else ''}{name}"

    def size(self, name: str) -> int:
        """Bytes of a file, of which a range was fetched before where the list does not say."""
        known = self._totals.get(name, self.sizes.get(name))
        if known is None:
            raise BadFile(f"{self.at(name)}: the hub does not say how large it is")
        return known

    def whole(self, name: str, *, most: int) -> bytes:
        """Fetch a small file: all of it, or ``most + 1`` bytes where it is larger."""
        with self._response(name, {}) as response:
            return _taken(response, most + 1)

    def range(self, name: str, start: int, stop: int) -> bytes:
        """Fetch bytes ``start`` to ``stop - 1``, or as many of them as the file has.

        Raises:
            BadFile: the hub sends whole files only.
            Unreachable, UnknownModel, InputError: as :meth:`open`.
        """
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        with self._response(name, headers) as response:
            if response.status_code == 416:
                return b""
            if response.status_code != 206 and start:
                raise BadFile(f"{self.at(name)}: the hub sends whole files only; headers are fetched by ranges")
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            if total.isdecimal():
                self._totals[name] = int(total)
            # A hub that sends the whole file is hung up on as soon as the range is there.
            return _taken(response, stop - start)

    @contextmanager
    def _response(self, name: str, headers: Mapping[str, str]) -> Iterator[Any]:
        from huggingface_hub import constants, get_session, hf_raise_for_status

        # Public and documented under this name alone, which the package exports only when it runs.
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = f"{constants.ENDPOINT}/{self.repo}/resolve/{quote(self.commit, safe='')}/{quote(name)}"
        with (
            _in_one_line(self.repo, self.commit),
            get_session().stream(
                "GET", url, headers={**build_hf_headers(), **headers}, timeout=_timeout(), follow_redirects=True
            ) as response,
        ):
            if response.status_code != 416:
                if response.status_code >= 400:
                    response.read()
                hf_raise_for_status(response)
            yield response


def _taken(response: Any, count: int) -> bytes:
    """The first ``count`` bytes of an answer; the rest is not waited for."""
    data = bytearray()
    for piece in response.iter_bytes(2**16):
        data += piece
        if len(data) >= count:
            break
    return bytes(data[:count])


def _timeout() -> float:
    from huggingface_hub import constants

    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


@contextmanager
def _in_one_line(repo: str, revision: str | None) -> Iterator[None]:
    """Say in one line, as an error of ours, what went wrong on the way to the hub and back."""
    try:
        yield
    except KvistError:
        raise
    except Exception as error:
        from huggingface_hub import constants

        named = _named(error, repo, revision, constants.ENDPOINT)
        if named is None:
            raise
        raise named from error


def _named(error: Exception, repo: str, revision: str | None, endpoint: str) -> Exception | None:
    # By name: the classes of the HTTP library under huggingface_hub change with its version.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "OfflineModeIsEnabled" in kinds:
        return Unreachable("HF_HUB_OFFLINE is set, and the hub is not asked")
    if "GatedRepoError" in kinds or status == 403:
        return InputError(
            f"{repo}: is gated on {endpoint}: ask for access there and log in with `hf auth login`, or set HF_TOKEN",
            key="model",
        )
    if "RevisionNotFoundError" in kinds:
        return UnknownModel(f"{repo}: has no revision {revision!r} on {endpoint}", key="model")
    if "RepositoryNotFoundError" in kinds or status == 401:
        return UnknownModel(
            f"no model {repo!r}, neither here nor on {endpoint} (a private one needs HF_TOKEN)", key="model"
        )
    if "EntryNotFoundError" in kinds or status == 404:
        return UnknownModel(f"{repo}: a file of it is not on {endpoint}", key="model")
    if isinstance(status, int):
        return Unreachable(f"{endpoint} answers {status}{_STATUS.get(status, '')}")
    if any("Timeout" in kind for kind in kinds):
        return Unreachable(f"{endpoint} does not answer within {_timeout():g} s (HF_HUB_DOWNLOAD_TIMEOUT)")
    if isinstance(error, (OSError, ValueError)) or any("TransportError" in kind for kind in kinds):
        said = " ".join(str(error).split()) or type(error).__name__
        return Unreachable(f"{endpoint} is not reached: {shown(said, 120)[1:-1]}")
    return None


_STATUS = {429: " (too many requests: wait, or log in)", 500: " (a failure of the hub)", 503: " (try again later)"}
