"""The native half of the package."""

from collections.abc import Callable, Generator
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias

from typing_extensions import Buffer

__version__: str

class _DLPack(Protocol):
    def __dlpack__(self, *, max_version: tuple[int, int] | None = ...) -> object: ...

class _Stream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

Memory: TypeAlias = Buffer | _DLPack | tuple[int, int, str | int]
Level: TypeAlias = Literal["sent", "placed", "verified"]
Stream: TypeAlias = int | _Stream | None

def generate_key() -> str:
    """A fresh key of 128 bits, as text."""

def connect(
    address: str,
    *,
    key: str | None = None,
    insecure: bool = False,
    gpu: int | None = None,
    timeout: float | None = None,
) -> Connection: ...
def log_to(emit: Callable[[int, str, str], None], level: int) -> None: ...
def end_log() -> None: ...

class Report:
    """What a finished transfer tells."""

    @property
    def nbytes(self) -> int:
        """Bytes moved; a receive may move fewer than it has room for."""
    @property
    def level(self) -> Level:
        """What is known about them."""
    @property
    def seconds(self) -> float:
        """From the start to the end."""
    @property
    def digest(self) -> int | None:
        """CRC32C of the bytes at level ``verified``."""

class Completions:
    def __new__(cls) -> Self: ...
    def fileno(self) -> int: ...
    def drain(self) -> list[int]: ...

class Transfer:
    """A send or a receive that has started. Dropping it cancels it."""

    def test(self) -> Report | None:
        """The report, or ``None`` while the transfer runs. Never waits."""
    def wait(self, timeout: float | None = None) -> Report:
        """Waits for the end. ``timeout`` (seconds) bounds the wait; the transfer goes on."""
    def cancel(self) -> None:
        """Asks for an early end; the transfer still ends once."""
    @property
    def progress(self) -> tuple[int, int]:
        """Bytes placed so far, and bytes in all (0 until a receive is matched)."""
    def watch(self, completions: Completions, token: int) -> bool: ...
    def __await__(self) -> Generator[object, None, Report]: ...

class Connection:
    """An authenticated connection; send and receive on it from any thread."""

    def send(
        self,
        source: Memory,
        tag: int = 0,
        *,
        level: Level = "placed",
        timeout: float | None = None,
        stall: float | None = None,
        stream: Stream = None,
    ) -> Transfer:
        """Starts a send; it matches the peer's next receive of this tag.

        Args:
            source: What to send. Do not write it before the end.
            tag: What sends and receives match on, in order.
            level: When it counts as done: ``sent`` (the source may be reused), ``placed`` (all
                bytes are at their destination) or ``verified`` (checksums were compared).
            timeout: Seconds for the transfer in all; none by default.
            stall: Seconds without progress after which it fails; 30 by default.
            stream: For GPU memory, the stream whose work comes first; torch's current one for a
                torch tensor by default.
        """
    def recv(
        self,
        destination: Memory,
        tag: int = 0,
        *,
        level: Level = "placed",
        timeout: float | None = None,
        stall: float | None = None,
        stream: Stream = None,
    ) -> Transfer:
        """Starts a receive into writable memory that is at least as long as the matching send."""
    @property
    def peer(self) -> str:
        """``host:port`` of the peer."""
    @property
    def path(self) -> str:
        """The path that the bytes take, and why, in one line."""
    @property
    def closed(self) -> bool: ...
    def status(self) -> list[str]:
        """Every live operation: where it stands and which side must act next."""
    def statistics(self) -> dict[str, int]:
        """Counters of the data plane by name."""
    def close(self, timeout: float = 5.0) -> None:
        """Finishes running transfers and says goodbye, within ``timeout`` seconds."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

class Endpoint:
    def __new__(
        cls,
        listen: str,
        *,
        key: str | None = None,
        insecure: bool = False,
        gpu: int | None = None,
        timeout: float | None = None,
    ) -> Self: ...
    @property
    def address(self) -> tuple[str, int]:
        """``(host, port)`` that it listens on."""
    @property
    def key(self) -> str | None:
        """The key that connecting sides need."""
    @property
    def closed(self) -> bool: ...
    def _accept(self, timeout: float | None = None) -> Connection: ...
    def close(self) -> None:
        """Stops listening. Connections that it accepted live on."""
