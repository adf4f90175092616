"""The LoRA servers of an engine's settings, and the adapters that they share with its store."""

from __future__ import annotations

import logging
from functools import partial

import torch

from coserve.config import Config
from coserve.core.errors import ConfigError, UnsupportedBase
from coserve.core.link.link import PeerLost
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.engine.lora_server.gpu_driver import IpcUnavailable
from coserve.engine.lora_server.ipc import Mailboxes
from coserve.engine.lora_server.messages import StartServer
from coserve.engine.lora_server.running import Answered, RunningServers, start_servers
from coserve.engine.lora_server.servers import LoraServers
from coserve.engine.lora_server.shared import connect_to_server
from coserve.lora.store.host_memory import Unread
from coserve.lora.store.packing import layout_of
from coserve.lora.store.store import Load
from coserve.model.base import Base
from coserve.model.lora import LoraWeights

log = logging.getLogger(__name__)


def make_servers(base: Base, config: Config, step_tokens: int, *, by_mailboxes: bool = True) -> LoraServers | None:
    """Begin to start the servers; None: the settings ask for none. `step_tokens`: the most tokens of a step, padded.
    `by_mailboxes`: GPUs exchange messages over mailboxes where they can, else by gloo, with a note in `/health`. They
    take memory of the GPU, which the memory plan finds in use. Raises `UnsupportedBase` and `ConfigError` for a base
    and GPUs that cannot have servers."""
    count = config.lora_server
    if not count:
        return None
    layers = {site.layer for site in base.spec.experts.values()}
    if not layers or base.states:
        why = "its layers keep a recurrent state" if layers else "adapters change no experts of it"
        raise UnsupportedBase(f"{base.spec.name}: expected a mixture that LoRA servers can serve, but {why}")
    ep, experts = config.lora_server_ep, min(site.experts for site in base.spec.experts.values())
    if count > ep * len(layers):
        most = f"{ep * len(layers)} with lora_server_ep {ep}, as {len(layers)} layers have experts"
        raise ConfigError(f"lora_server: expected at most {most}, got {count}")
    if ep > experts:
        raise ConfigError(f"lora_server_ep: expected at most {experts}, the experts of a layer, got {ep}")
    cuda, found, at = base.device.type == "cuda", torch.cuda.device_count(), config.lora_server_at
    if cuda and at is None and found <= count:
        raise ConfigError(f"lora_server: expected {count + 1} GPUs, one of them for the base, found {found}")
    if at is not None and not at.is_dir():
        raise ConfigError(f"lora_server_at: expected a folder of LoRA servers (coserve lora-server), got {at}")
    threads = max(1, torch.get_num_threads())

    mailboxes, note = None, ""
    if cuda and by_mailboxes:
        mailboxes, note = _mailboxes(base, count, step_tokens)
    elif cuda:
        note = _note("mailboxes between GPUs are off")
    ended = mailboxes.close if mailboxes else lambda: None
    begin = start_servers if at is None else partial(start_servers, launch=partial(connect_to_server, at), meeting=at)

    def start(number: int, answered: Answered) -> RunningServers:
        nonlocal mailboxes, note
        settings = [
            StartServer(
                index=index,
                servers=count,
                ep=ep,
                start=number,
                rendezvous="",
                deadline=config.lora_server_timeout,
                spec=base.spec,
                data_dir=str(config.data_dir.absolute()),
                device=f"cuda:{found - count + index}" if cuda else "cpu",
                threads=threads,
                logs=config.logs,
            )
            for index in range(count)
        ]
        try:
            return begin(settings, answered, mailboxes, note)
        except (IpcUnavailable, PeerLost) as error:
            if mailboxes is None or number > 1:  # mailboxes have worked before: try again
                raise
            mailboxes, note = None, _note(error)
            return begin(settings, answered, note=note)

    return LoraServers(count, start, config.lora_server_timeout, ended, at)


def _mailboxes(base: Base, servers: int, tokens: int) -> tuple[Mailboxes | None, str]:
    """Return mailboxes on the engine's GPU, or None and a note."""
    try:
        return Mailboxes(base.device, base.spec, servers, tokens), ""
    except IpcUnavailable as error:
        return None, _note(error)


def _note(error: Exception | str) -> str:
    """Return a note on the slower way, and log it."""
    why = str(error) or type(error).__name__
    note = f"LoRA servers are reached through host memory, which is slower: {why}"
    log.warning("%s", note)
    return note


def load_on_servers(load: Load, servers: LoraServers) -> Load:
    """Wrap `load` so that the servers read an adapter at the same time, and have it when it returns."""

    def everywhere(ref: AdapterRef, digests: AdapterDigests | None) -> Unread | LoraWeights:
        wait = servers.load(ref, digests)
        found = load(ref, digests)
        layout = layout_of(found) if isinstance(found, LoraWeights) else found.layout
        if any(place.like.experts > 1 for place in layout.places.values()):
            wait()
        else:
            servers.dropped(ref)
        return found

    return everywhere
