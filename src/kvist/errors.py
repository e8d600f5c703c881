"""Every error that kvist raises on purpose.

::

    KvistError                  something a user can act on; one line, no traceback at the command line
    ├── InputError              the input or the call is wrong            exit 2, HTTP 400
    │   ├── UnknownModel        no such model, or several match           exit 2, HTTP 404
    │   ├── UnsupportedModel    a model that cannot be read exactly       exit 2
    │   └── BadFile             a torn, foreign or wrong file             exit 2
    ├── DoesNotFit              the honest answer is "it does not fit"    exit 3, HTTP 400
    └── EngineFailure           our own failure while serving             exit 1, HTTP 500

Each message names what was wrong, the value, and what would be right.
"""


class KvistError(Exception):
    """Root of the tree: a message that a user can act on."""

    exit_code = 1


class InputError(KvistError, ValueError):
    """The input or the call is wrong.

    ``key`` is the parameter at fault where there is one, so that a server can name it.
    """

    exit_code = 2

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class UnknownModel(InputError):
    """No model has this name, or several do."""


class UnsupportedModel(InputError):
    """A model that cannot be read exactly; the message names the key that stopped it."""


class BadFile(InputError):
    """A file is torn, of another kind, or not what its name says."""


class DoesNotFit(KvistError):
    """More memory is needed than there is; the message shows the sum."""

    exit_code = 3


class EngineFailure(KvistError):
    """kvist itself failed while it served a request."""
