"""Devices and what they can do: the machine at hand, clusters by name, and honest measurement on this machine.

Names are imported when they are first used: only what looks at this machine's devices needs torch.
"""

from typing import TYPE_CHECKING

from tangram.lazy import lazily

__all__ = [
    "Cluster",
    "Device",
    "Figures",
    "Link",
    "Machine",
    "Pairs",
    "Row",
    "cluster_names",
    "device",
    "device_figures",
    "interleaved",
    "paired",
    "read_cluster",
    "this_machine",
]

if TYPE_CHECKING:
    from tangram.hardware.catalogue.cluster import Cluster, Device, Link
    from tangram.hardware.catalogue.cluster import load as read_cluster
    from tangram.hardware.catalogue.cluster import names as cluster_names
    from tangram.hardware.catalogue.devices import Figures, device
    from tangram.hardware.catalogue.devices import devices as device_figures
    from tangram.hardware.host.machine import Machine
    from tangram.hardware.host.machine import describe as this_machine
    from tangram.hardware.measuring.measure import Pairs, Row, interleaved, paired
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tangram.hardware.catalogue.cluster": [
                "Cluster",
                "Device",
                "Link",
                "load as read_cluster",
                "names as cluster_names",
            ],
            "tangram.hardware.catalogue.devices": ["Figures", "device", "devices as device_figures"],
            "tangram.hardware.host.machine": ["Machine", "describe as this_machine"],
            "tangram.hardware.measuring.measure": ["Pairs", "Row", "interleaved", "paired"],
        },
    )
