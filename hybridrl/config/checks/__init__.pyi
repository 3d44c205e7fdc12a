from . import megatron as megatron
