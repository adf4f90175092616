"""NVIDIA's driver of a GPU whose memory is the host's, as strict as the real one about threads and memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

CONTEXT = 77
UNKNOWN, NO_CONTEXT, ALREADY_MAPPED, NOT_MAPPED = 1, 201, 712, 713
Number = ctypes.POINTER(ctypes.c_uint64)


class Function:
    """A function of the library; it takes what the caller would give to C."""

    argtypes: Sequence[object] = ()
    restype: object = None

    def __init__(self, body: Callable[..., int]) -> None:
        self._body = body

    def __call__(self, *arguments: object) -> int:
        return self._body(*arguments)


class FakeDriver:
    """In place of `ctypes.CDLL` of the driver. `registered`: bytes of host memory by address, as long as the GPU may
    access them; `allocated`: the GPU's memory; `opened`: addresses of it that are open, as other processes open them;
    `exports`: whether they can."""

    exports = True

    def __init__(self) -> None:
        self.registered, self.allocated = dict[int, int](), dict[int, ctypes.Array[ctypes.c_char]]()
        self.opened = list[int]()
        self._thread = threading.local()
        needs_none = {"cuGetErrorString", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"}
        bodies: dict[str, Callable[..., int]] = {
            "cuGetErrorString": lambda code, text: _write(text, 0),
            "cuDevicePrimaryCtxRetain": lambda found, _: _write(found, CONTEXT),
            "cuCtxSetCurrent": self._enter,
            "cuCtxSynchronize": lambda: 0,
            "cuMemAlloc_v2": self._allocate,
            "cuMemFree_v2": lambda address: 0 if self.allocated.pop(address, None) else UNKNOWN,
            "cuIpcGetMemHandle": lambda handle, address: _write(handle, address) if self.exports else UNKNOWN,
            "cuIpcOpenMemHandle_v2": self._open,
            "cuIpcCloseMemHandle": self._close,
            "cuMemHostRegister_v2": self._register,
            "cuMemHostUnregister": lambda address: 0 if self.registered.pop(address, None) else NOT_MAPPED,
            "cuMemHostGetDevicePointer_v2": lambda found, address, _: _write(found, address),
        }
        self._functions = {
            name: Function(body if name in needs_none else self._checked(body)) for name, body in bodies.items()
        }

    def __getattr__(self, name: str) -> Function:
        return self._functions.get(name) or Function(lambda *_: UNKNOWN)

    def _checked(self, body: Callable[..., int]) -> Callable[..., int]:
        return lambda *arguments: body(*arguments) if getattr(self._thread, "context", 0) == CONTEXT else NO_CONTEXT

    def _enter(self, context: ctypes.c_void_p) -> int:
        self._thread.context = context.value
        return 0

    def _allocate(self, found: object, size: int) -> int:
        memory = ctypes.create_string_buffer(size)
        self.allocated[ctypes.addressof(memory)] = memory
        return _write(found, ctypes.addressof(memory))

    def _open(self, found: object, handle: ctypes.Structure, _: int) -> int:
        self.opened.append(int.from_bytes(bytes(handle)[:8], "little"))
        return _write(found, self.opened[-1])

    def _close(self, address: int) -> int:
        if address not in self.opened:
            return NOT_MAPPED
        self.opened.remove(address)
        return 0

    def _register(self, address: int, size: int, _: int) -> int:
        if any(address < first + length and first < address + size for first, length in self.registered.items()):
            return ALREADY_MAPPED
        self.registered[address] = size
        return 0


def _write(to: object, value: int) -> int:
    ctypes.cast(to, Number)[0] = value  # type: ignore[arg-type]
    return 0
