"""The transports by name, and what worker processes use of them: `make_sender` and `Receivers`.

A transport of your own is a `Transport` class, given by its import path.
"""

from hybridrl.config.capabilities import TransportCapabilities
from hybridrl.config.schema.rollout import TRANSPORTS_BY_PLACEMENT, WeightSyncConfig
from hybridrl.errors import ConfigError, StaleWeightsError
from hybridrl.registry import Registry
from hybridrl.workers.weight_transfer import base

TRANSPORTS: Registry[type[base.Transport]] = Registry(
    f"{base.KEY}.transport",
    kind="transport",
    builtins={
        name: f"hybridrl.workers.weight_transfer.{name}:{cls}"
        for name, cls in {
            "object_store": "ObjectStoreTransport",
            "disk": "DiskTransport",
            "shared_memory": "SharedMemoryTransport",
            "broadcast": "BroadcastTransport",
        }.items()
    },
    plugins="actor_rollout_ref.model.external_lib",
)


def transport_class(name: str) -> type[base.Transport]:
    """Return the transport called `name`, or the one at an import path.

    Raises:
        ConfigError: The name is unknown, or it is no transport.
    """
    if problem := TRANSPORTS.problem(name):
        raise ConfigError(
            f"{TRANSPORTS.setting}={problem}; {' and '.join(TRANSPORTS_BY_PLACEMENT)} leave the choice to hybridrl"
        )
    found = TRANSPORTS.lookup(name)
    if not (isinstance(found, type) and issubclass(found, base.Transport)):
        raise ConfigError(
            f"{TRANSPORTS.setting}={name}: {found!r} is not a transport; derive a class from "
            "hybridrl.workers.weight_transfer.Transport"
        )
    return found


def transport_capabilities(name: str) -> TransportCapabilities:
    """Return what the transport declares. Raises as `transport_class` does."""
    return transport_class(name).capabilities


def make_sender(
    name: str, settings: WeightSyncConfig, *, host: str, num_receivers: int, device: str, timeout_s: float = 1800.0
) -> base.Sender:
    """Return the sender of transport `name`; see `SenderSetup`."""
    setup = base.SenderSetup(
        transport=name,
        bucket_bytes=settings.bucket_mb << 20,
        directory=settings.directory,
        host=host,
        num_receivers=num_receivers,
        device=device,
        timeout_s=timeout_s,
    )
    return transport_class(name).make_sender(setup)


class Receivers:
    """The receiving side of a rollout process, for all transports.

    It is in at most one channel at a time.

    rank: of this process in its group. device: where it computes. timeout_s: how long it waits for stored weights.
    """

    def __init__(self, *, rank: int, device: str, timeout_s: float):
        self._setup = base.ReceiverSetup(rank=rank, device=device, timeout_s=timeout_s)
        self._streaming: base.Receiver | None = None

    def join(self, address: base.SenderAddress) -> None:
        """Connect to a streaming sender, in place of an earlier one."""
        self.close()
        self._streaming = transport_class(address.transport).make_receiver(self._setup, address)

    def receive(self, version: int, sent: base.PushReceipt | None) -> base.IncomingWeights:
        """Return the weights of `version` as they arrive.

        Args:
            version: of the push.
            sent: the receipt of a stored push; None receives from the streaming sender.
        """
        if sent is not None:
            return transport_class(sent.transport).make_receiver(self._setup, None).receive(version, sent)
        if self._streaming is None:
            raise StaleWeightsError(
                f"version {version} should arrive over a channel, but this rollout has joined none; call "
                "join_weight_channel() first"
            )
        return self._streaming.receive(version, None)

    def close(self) -> None:
        """Leave the channel."""
        if self._streaming is not None:
            self._streaming.close()
        self._streaming = None
