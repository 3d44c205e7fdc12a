"""How the processes of a job are called on a Ray cluster. A job's run is `run`; everything of it is called `run/...`."""

# Names are looked up here; a driver's own namespace would hide its processes from every other driver.
NAMESPACE = "hybridrl"
MASTER = "master"
KEEPER = "keeper"  # of a submitted job: the process that starts the others, and starts them again
NOTES, RECOVERIES = "notes", "recoveries"  # its threads for what the trainer says


def master_name(run: str) -> str:
    return f"{run}/{MASTER}"


def memory_name(run: str) -> str:
    return f"{run}/memory"


def slot_of(name: str) -> str:
    """Return the slot that a process fills: `run/actor-0` and `run/actor-0.2`, its second life, are both of `actor-0`."""
    return name.rpartition("/")[2].split(".")[0]
