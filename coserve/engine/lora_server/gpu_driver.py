"""Calls of NVIDIA's driver that torch does not wrap (CUDA driver API): memory that another process opens, and words in
host memory that a stream writes and waits for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import torch

from coserve.kernels.gpu.rounding import cdiv

LIBRARY = "libcuda.so.1"
LAZY_PEER_ACCESS = 1
"""`CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`."""
PORTABLE_MAPPED = 3
"""`CU_MEMHOSTREGISTER_PORTABLE` and `CU_MEMHOSTREGISTER_DEVICEMAP`."""
AT_LEAST = 0
"""`CU_STREAM_WAIT_VALUE_GEQ`: the difference, as a signed 32-bit number, is not negative."""
BLOCK = 1 << 21
"""Bytes of the driver's blocks. Smaller allocations may share one, and a process that opens one of them opens the whole
block (CUDA C++ Programming Guide, "Interprocess Communication")."""
FENCE = 0
"""`CU_STREAM_WRITE_VALUE_DEFAULT`: whoever sees the word sees all writes of the stream before it."""


class IpcUnavailable(ConnectionError):
    """GPUs of this host cannot exchange messages between processes."""


class StreamOps(Protocol):
    """Operations on a GPU's current stream: they run in order with the kernels there, and never block the host. All
    addresses are the device's; sizes are in bytes."""

    def copy(self, to: int, source: int, size: int) -> None: ...

    def write(self, word: int, value: int) -> None:
        """Write a 32-bit word once all before it is done."""
        ...

    def wait(self, word: int, value: int) -> None:
        """Hold the stream until a 32-bit word is at least `value`."""
        ...

    def mark(self) -> Callable[[], None]:
        """Return a function that blocks the host until all before it in the stream is done."""
        ...


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class GpuDriver:
    """Implements `StreamOps`. Raises `IpcUnavailable` if the driver lacks a function, or if a call fails. Memory may be
    taken on any thread; it is the process's until `close`."""

    def __init__(self, device: torch.device) -> None:
        torch.zeros((), device=device)  # torch comes first, so that the context is its own
        self._index = device.index or 0
        self._taken = list[tuple[str, Callable[[int], int], int]]()
        """Allocated, opened and registered addresses, and what gives them back."""
        try:
            library: Any = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise IpcUnavailable(f"there is no CUDA driver ({LIBRARY})") from error
        address, size, word, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_void_p
        out = ctypes.POINTER(ctypes.c_uint64)

        def function(name: str, *types: object) -> Any:  # noqa: ANN401 - a C function
            found = getattr(library, name, None)
            if found is None:
                raise IpcUnavailable(f"the CUDA driver has no {name}")
            found.argtypes, found.restype = types, ctypes.c_int
            return found

        self._text = function("cuGetErrorString", ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
        self._enter = function("cuCtxSetCurrent", pointer)
        self._finish = function("cuCtxSynchronize")
        self._allocate = function("cuMemAlloc_v2", out, size)
        self._free = function("cuMemFree_v2", address)
        self._export = function("cuIpcGetMemHandle", ctypes.POINTER(_Handle), address)
        self._open = function("cuIpcOpenMemHandle_v2", out, _Handle, ctypes.c_uint)
        self._unmap = function("cuIpcCloseMemHandle", address)
        self._register = function("cuMemHostRegister_v2", pointer, size, ctypes.c_uint)
        self._unregister = function("cuMemHostUnregister", address)
        self._mapped = function("cuMemHostGetDevicePointer_v2", out, pointer, ctypes.c_uint)
        self._copy = function("cuMemcpyDtoDAsync_v2", address, address, size, pointer)
        self._write = function("cuStreamWriteValue32_v2", pointer, address, word, ctypes.c_uint)
        self._wait = function("cuStreamWaitValue32_v2", pointer, address, word, ctypes.c_uint)
        retain = function("cuDevicePrimaryCtxRetain", ctypes.POINTER(pointer), ctypes.c_int)
        self._context = ctypes.c_void_p()
        self._check("cuDevicePrimaryCtxRetain", retain(ctypes.byref(self._context), self._index))

    def enter(self) -> None:
        """Make the device's context current on this thread. A thread begins without one, and torch gives it one only
        with the first kernel: `torch.cuda.set_device` does nothing for the device that is current anyway."""
        self._check("cuCtxSetCurrent", self._enter(self._context))

    def allocate(self, size: int) -> tuple[int, bytes]:
        """Allocate whole blocks, apart from torch's memory, not all of which can be opened by others. Return the
        address, and the handle by which another process opens it."""
        self.enter()
        found, handle = ctypes.c_uint64(), _Handle()
        self._check("cuMemAlloc", self._allocate(ctypes.byref(found), BLOCK * cdiv(size, BLOCK)))
        self._taken.append(("cuMemFree", self._free, found.value))
        self._check("cuIpcGetMemHandle", self._export(ctypes.byref(handle), found.value))
        return found.value, bytes(handle)

    def open(self, handle: bytes) -> int:
        """Open another process's memory, on any GPU that this one can access; return its address here."""
        self.enter()
        found = ctypes.c_uint64()
        own = _Handle.from_buffer_copy(handle)
        self._check("cuIpcOpenMemHandle", self._open(ctypes.byref(found), own, LAZY_PEER_ACCESS))
        self._taken.append(("cuIpcCloseMemHandle", self._unmap, found.value))
        return found.value

    def register(self, address: int, size: int) -> int:
        """Let the GPU access host memory, which must stay mapped until `close`; return its address on the device."""
        self.enter()
        found = ctypes.c_uint64()
        self._check("cuMemHostRegister", self._register(address, size, PORTABLE_MAPPED))
        self._taken.append(("cuMemHostUnregister", self._unregister, address))
        self._check("cuMemHostGetDevicePointer", self._mapped(ctypes.byref(found), address, 0))
        return found.value

    def finish(self) -> None:
        """Wait until the GPU has come to the end of all streams of the process: none of them may wait for a peer."""
        self.enter()
        self._check("cuCtxSynchronize", self._finish())

    def close(self) -> None:
        """Give all memory back; no stream may use it any more."""
        self.enter()
        while self._taken:
            name, give_back, address = self._taken.pop()
            self._check(name, give_back(address))

    def copy(self, to: int, source: int, size: int) -> None:
        self._check("cuMemcpyDtoDAsync", self._copy(to, source, size, self._stream()))

    def write(self, word: int, value: int) -> None:
        self._check("cuStreamWriteValue32", self._write(self._stream(), word, value, FENCE))

    def wait(self, word: int, value: int) -> None:
        self._check("cuStreamWaitValue32", self._wait(self._stream(), word, value, AT_LEAST))

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._index))
        return event.synchronize

    def _stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._index)

    def _check(self, name: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._text(code, ctypes.byref(text))
            raise IpcUnavailable(f"{name}: {(text.value or b'').decode() or code}")
