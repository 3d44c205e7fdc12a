"""Which accelerators a worker process may see. Ray reserves them; this file makes the process agree with what was reserved.

Ray writes the reserved devices into the visibility variable of the accelerator's maker, unless it is told not to
(RAY_EXPERIMENTAL_NOSET_*, as clusters do whose containers renumber devices). Then the process would see every device of its node and
all ranks would take the first one, so the variable is written here. Groups with fractions of one device see that same device.
"""

from collections.abc import Mapping, Sequence

# Ray's name of a resource -> the variables that hide its other devices from a process.
VISIBILITY_VARIABLES = {
    "GPU": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "NPU": ("ASCEND_RT_VISIBLE_DEVICES",),
    "HPU": ("HABANA_VISIBLE_MODULES",),
    "neuron_cores": ("NEURON_RT_VISIBLE_CORES",),
    "TPU": ("TPU_VISIBLE_CHIPS",),
}


def visible_devices(reserved: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set in a worker process, from the device ids that Ray reserved for it.

    reserved: resource name -> ids, as Ray's runtime context reports them. environment: the process's own. A worker without devices
    gets nothing: what hides devices from it is already set or not wanted.
    """
    wanted: dict[str, str] = {}
    for resource, ids in reserved.items():
        for variable in VISIBILITY_VARIABLES.get(resource, ()) if ids else ():
            if environment.get(f"RAY_EXPERIMENTAL_NOSET_{variable}", "").lower() in ("1", "true"):
                wanted[variable] = ",".join(map(str, ids))
    return wanted
