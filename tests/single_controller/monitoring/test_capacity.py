import os

import pytest

from hybridrl.single_controller.monitoring.capacity import MemoryProbe, disk_capacity

GIB = 2**30


def test_without_a_limit_the_capacity_is_the_machines():
    left, total = MemoryProbe().read()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < left < total <= pages


def probe_of(folder, cgroup, **files):
    """Return a probe of kernel files with 8 GiB of memory, 6 of them available, and control groups."""
    files = {
        "proc/meminfo": f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable: {6 * GIB // 1024} kB\n",
        "proc/self/cgroup": cgroup,
    } | files
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return MemoryProbe(str(folder / "proc"), str(folder / "groups"))


def group_2(path, limit, used, inactive=0, active=0):
    stat = f"anon {used}\ninactive_file {inactive}\nactive_file {active}\nslab_reclaimable 0\n"
    return {
        f"groups/{path}/memory.max": limit,
        f"groups/{path}/memory.current": used,
        f"groups/{path}/memory.stat": stat,
    }


def test_a_containers_limit_applies_where_it_leaves_less(tmp_path):
    """Of 4 GiB, 3 are used, of which the kernel can reclaim half a GiB of files: 1.5 GiB are left."""
    files = group_2("pod/one", 4 * GIB, 3 * GIB, inactive=GIB // 4, active=GIB // 4) | group_2("pod", "max", 7 * GIB)
    assert probe_of(tmp_path, "0::/pod/one\n", **files).read() == (3 * GIB // 2, 4 * GIB)


def test_the_limit_of_an_ancestor_group_applies_too(tmp_path):
    files = group_2("pod/one", 4 * GIB, GIB) | group_2("pod", 5 * GIB, 5 * GIB - 1)
    assert probe_of(tmp_path, "0::/pod/one\n", **files).read() == (1, 5 * GIB)


def test_a_container_that_sees_itself_as_the_root_finds_its_limit_there(tmp_path):
    """Version 1 of control groups: the paths are the host's and do not exist in the container."""
    stat = f"total_inactive_file {GIB}\ntotal_active_file 0\n"
    here = {"memory.limit_in_bytes": 3 * GIB, "memory.usage_in_bytes": 2 * GIB, "memory.stat": stat}
    files = {f"groups/memory/{name}": text for name, text in here.items()}
    assert probe_of(tmp_path, "9:cpuset:/docker/ab\n4:memory:/docker/ab\n0::/\n", **files).read() == (2 * GIB, 3 * GIB)


@pytest.mark.parametrize("limit", ["max", 9223372036854771712, 9 * GIB])
def test_a_limit_above_the_machines_memory_is_ignored(tmp_path, limit):
    assert probe_of(tmp_path, "0::/\n", **group_2("", limit, 8 * GIB)).read() == (6 * GIB, 8 * GIB)


def test_a_disks_capacity_is_what_users_can_write_and_a_missing_path_has_none(tmp_path):
    left, total = disk_capacity(str(tmp_path))
    assert 0 < left < total
    assert disk_capacity(str(tmp_path / "nowhere")) is None
