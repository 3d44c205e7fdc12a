from .cluster.ray_cluster import start_local_cluster as start_local_cluster
from .cluster.ray_cluster import start_ray as start_ray
from .resume_command import save_command as save_command
from .supervisor import can_supervise as can_supervise
from .supervisor import supervise as supervise
