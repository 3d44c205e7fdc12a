"""What model FLOPs utilization (MFU) is made of: the FLOPs of a model, and the peak of a device."""
