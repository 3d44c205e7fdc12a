"""Parts of model FLOPs utilization (MFU): the FLOPs of a model, and the peak of a device."""
