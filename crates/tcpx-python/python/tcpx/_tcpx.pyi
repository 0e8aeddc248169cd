"""The native half of the package."""

from collections.abc import Callable, Coroutine, Generator
from os import PathLike
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias, TypedDict

from typing_extensions import Buffer

__version__: str

class _DLPack(Protocol):
    def __dlpack__(self, *, max_version: tuple[int, int] | None = ...) -> object: ...

class _Stream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

Memory: TypeAlias = Buffer | _DLPack | tuple[int, int, str | int]
Level: TypeAlias = Literal["sent", "placed", "verified"]
Stream: TypeAlias = int | _Stream | Literal["ready"] | None
Progress: TypeAlias = Literal["background", "manual"]
Local: TypeAlias = Literal["auto", "on", "off"]
Rights: TypeAlias = Literal["get", "put", "get+put"]

def generate_key() -> str:
    """A fresh key of 128 bits for a listening side, as text. Its ``Endpoint.key`` is for connecting sides."""

class Limits(TypedDict, total=False):
    """What a side takes of its peer at a time, each from 1 to 2**20; what is not given is the default, which is many."""

    puts: int
    """Puts into windows of this side."""
    notifications: int
    """Notifications, those included that nobody has collected."""
    gets: int
    """Gets from its windows."""
    asks: int
    """Sends for which no receive is there."""
    windows: int
    """Receives of the peer that wait for sends of this side."""
    tags: int
    """Tags whose sends it counts."""
    pieces: int
    """Pieces of batches."""
    list_windows: int
    """Windows that a batch names."""

class Settings(TypedDict):
    key: str | None
    key_file: str | PathLike[str] | None
    insecure: bool
    encrypt: bool
    local: Local | None
    gpu: int | None
    progress: Progress
    limits: Limits | None
    timeout: float | None

def reachable(address: str) -> str: ...
def connect(address: str, settings: Settings) -> Connection: ...
def dial(address: str, settings: Settings) -> Dialling: ...
def stop_releasing() -> None: ...

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

class NextConnection:
    def poll_once(self, completions: Completions) -> Connection | None: ...
    def watch(self, completions: Completions, token: int) -> Connection | None: ...
    def unwatch(self, completions: Completions, token: int) -> None: ...

class Dialling:
    def poll_once(self, completions: Completions) -> Connection | None: ...
    def watch(self, completions: Completions, token: int) -> Connection | None: ...
    def unwatch(self, completions: Completions, token: int) -> None: ...

class Transfer:
    """A send, receive, put, get or batch that has started. Dropping it cancels it."""

    def test(self) -> Report | None:
        """The report, or ``None`` while the transfer runs. Never waits."""
    def wait(
        self,
        timeout: float | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> Report:
        """Waits for the end.

        Args:
            timeout: Seconds that bound the wait; the transfer goes on.
            progress: Called with bytes done and bytes in all, about ten times a second while this waits
                and once at the end.
        """
    def track(
        self, progress: Callable[[int, int], object], every: float = 0.1
    ) -> Coroutine[object, object, Report]:
        """To be awaited: as the transfer, and ``progress`` is called every ``every`` seconds with bytes done
        and bytes in all, and once at the end."""
    def cancel(self) -> None:
        """Asks for an early end; the transfer still ends once."""
    @property
    def progress(self) -> tuple[int, int]:
        """Bytes placed so far, and bytes in all (0 until a receive is matched)."""
    def poll_once(self, completions: Completions) -> Report | None: ...
    def watch(self, completions: Completions, token: int) -> Report | None: ...
    def unwatch(self, completions: Completions, token: int) -> None: ...
    def progress_fd(self) -> int | None: ...
    def make_progress(self) -> bool: ...
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
                bytes are at their destination) or ``verified`` (keyed tags were compared; ask at both ends).
            timeout: Seconds for the transfer in all; none by default.
            stall: Seconds without progress after which it fails; 30 by default.
            stream: For GPU memory, the stream whose work comes first; torch's current one for a
                torch tensor by default. ``"ready"``: the bytes are there, wait for nothing.
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
    def expose(self, memory: Memory, rights: Rights = "get+put") -> Window:
        """Opens memory to the peer, which may use it without this program's part.

        Args:
            memory: What to open; writable where ``rights`` allow to put. It is held until the
                window is revoked or dropped.
            rights: What the peer may do there.
        """
    def put(
        self,
        source: Memory,
        key: bytes,
        offset: int = 0,
        *,
        notify: bytes | None = None,
        level: Level = "placed",
        timeout: float | None = None,
        stall: float | None = None,
        stream: Stream = None,
    ) -> Transfer:
        """Starts a write into a window of the peer, from byte ``offset`` of that on.

        Args:
            source: What to write. Do not change it before the end.
            key: The window's ``key``, as the peer gave it.
            offset: First byte, from the start of the window.
            notify: Up to 64 KiB that the peer gets from :meth:`notification` once the bytes are
                there; the transfer ends after that.
            level, timeout, stall, stream: As for :meth:`send`.
        """
    def get(
        self,
        destination: Memory,
        key: bytes,
        offset: int = 0,
        *,
        notify: bytes | None = None,
        level: Level = "placed",
        timeout: float | None = None,
        stall: float | None = None,
        stream: Stream = None,
    ) -> Transfer:
        """Starts a read from a window of the peer, which fills ``destination``; as :meth:`put`."""
    def batch(
        self,
        *,
        level: Level = "placed",
        timeout: float | None = None,
        stall: float | None = None,
        stream: Stream = None,
    ) -> Batch:
        """Puts and gets that run together as one transfer, in no order."""
    def notify(self, message: bytes) -> Transfer:
        """Sends up to 64 KiB that the peer gets from :meth:`notification`."""
    def notification(self) -> NextNotification:
        """The peer's next notification: ``.wait(timeout)``, or ``await``."""
    @property
    def peer(self) -> str:
        """``host:port`` of the peer."""
    @property
    def path(self) -> str:
        """The path that the bytes take, and why, in one line."""
    @property
    def closed(self) -> bool: ...
    def progress(self) -> bool:
        """Makes all the progress that can be made now, and never waits; whether there may be more to do
        at once. For ``progress="manual"``."""
    def progress_fd(self) -> int:
        """A descriptor that is readable while :meth:`progress` finds something to do, for ``select`` and the
        like under ``progress="manual"``: call :meth:`progress` until it is false, then wait."""
    def status(self) -> list[str]:
        """Every live operation: where it stands and which side must act next."""
    def statistics(self) -> dict[str, int]:
        """Counters of the data plane by name."""
    def close(self, timeout: float = 5.0) -> None:
        """Finishes running transfers and says goodbye, within ``timeout`` seconds. One that follows another that was
        given up waits too."""
    def aclose(self, timeout: float = 5.0) -> Closing:
        """The same, to be awaited. It begins at once, and goes on where nobody awaits it."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

class Closing:
    """A connection that is being closed; await it."""

    def poll_once(self, completions: Completions) -> bool | None: ...
    def watch(self, completions: Completions, token: int) -> bool | None: ...
    def unwatch(self, completions: Completions, token: int) -> None: ...
    def __await__(self) -> Generator[object, None, None]: ...

class Window:
    """Memory that is open to the peer. Dropping it revokes it; also a context manager."""

    @property
    def key(self) -> bytes:
        """What lets the peer in; give it to the peer by any means."""
    def revoke(self, timeout: float = 5.0) -> None:
        """Closes the window, and waits until nothing of the peer touches the memory."""
    @property
    def revoked(self) -> bool: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

class Batch:
    """Puts and gets that have not started yet."""

    def put(self, source: Memory, key: bytes, offset: int = 0) -> Self:
        """Adds a write into a window of the peer."""
    def get(self, destination: Memory, key: bytes, offset: int = 0) -> Self:
        """Adds a read from a window of the peer."""
    def notify(self, message: bytes) -> Self:
        """Sends up to 64 KiB behind the parts: the peer gets it when every put is applied there
        and every get has ended here, and never when one of them failed."""
    def start(self) -> Transfer:
        """Starts all of it as one transfer; the batch is empty afterwards."""
    def __len__(self) -> int: ...

class NextNotification:
    """A notification that the peer has sent, or will send."""

    def wait(self, timeout: float | None = None) -> bytes:
        """The notification. ``timeout`` (seconds) bounds the wait."""
    def test(self) -> bytes | None:
        """The notification, or ``None`` when there is none yet. Never waits."""
    def poll_once(self, completions: Completions) -> bytes | None: ...
    def watch(self, completions: Completions, token: int) -> bytes | None: ...
    def unwatch(self, completions: Completions, token: int) -> None: ...
    def progress_fd(self) -> int | None: ...
    def make_progress(self) -> bool: ...
    def __await__(self) -> Generator[object, None, bytes]: ...

class Endpoint:
    def __new__(cls, listen: str, settings: Settings) -> Self: ...
    @property
    def address(self) -> tuple[str, int]:
        """``(host, port)`` that it listens on."""
    @property
    def key(self) -> str | None:
        """The key that connecting sides need."""
    @property
    def closed(self) -> bool: ...
    def _accept(self, timeout: float | None = None) -> Connection: ...
    def _next(self) -> NextConnection: ...
    def close(self) -> None:
        """Stops listening. Connections that it accepted live on."""
