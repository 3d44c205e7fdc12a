import os

import pytest

from hybridrl.single_controller.monitoring.capacity import MemoryGauge, disk_room

GIB = 2**30


def test_without_a_limit_it_is_the_machines_memory_that_is_left():
    left, total = MemoryGauge().read()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < left < total <= pages


def lay_out(folder, cgroup, **files):
    """A kernel's files: 8 GiB of memory, 6 of them available, and control groups."""
    files = {
        "proc/meminfo": f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable: {6 * GIB // 1024} kB\n",
        "proc/self/cgroup": cgroup,
    } | files
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return MemoryGauge(str(folder / "proc"), str(folder / "groups"))


def group_2(path, limit, used, inactive=0, active=0):
    stat = f"anon {used}\ninactive_file {inactive}\nactive_file {active}\nslab_reclaimable 0\n"
    return {
        f"groups/{path}/memory.max": limit,
        f"groups/{path}/memory.current": used,
        f"groups/{path}/memory.stat": stat,
    }


def test_a_containers_limit_counts_where_less_is_left_of_it(tmp_path):
    """Of 4 GiB, 3 are used, of which the kernel can take half a GiB of files back: 1.5 GiB are left."""
    files = group_2("pod/one", 4 * GIB, 3 * GIB, inactive=GIB // 4, active=GIB // 4) | group_2("pod", "max", 7 * GIB)
    assert lay_out(tmp_path, "0::/pod/one\n", **files).read() == (3 * GIB // 2, 4 * GIB)


def test_the_limit_of_a_group_that_holds_this_one_counts_too(tmp_path):
    files = group_2("pod/one", 4 * GIB, GIB) | group_2("pod", 5 * GIB, 5 * GIB - 1)
    assert lay_out(tmp_path, "0::/pod/one\n", **files).read() == (1, 5 * GIB)


def test_a_container_that_sees_itself_as_the_root_finds_its_limit_there(tmp_path):
    """The first version of control groups, whose paths are the host's, and are not there in the container."""
    stat = f"total_inactive_file {GIB}\ntotal_active_file 0\n"
    here = {"memory.limit_in_bytes": 3 * GIB, "memory.usage_in_bytes": 2 * GIB, "memory.stat": stat}
    files = {f"groups/memory/{name}": text for name, text in here.items()}
    assert lay_out(tmp_path, "9:cpuset:/docker/ab\n4:memory:/docker/ab\n0::/\n", **files).read() == (2 * GIB, 3 * GIB)


@pytest.mark.parametrize("limit", ["max", 9223372036854771712, 9 * GIB])
def test_a_limit_above_the_machines_memory_is_none(tmp_path, limit):
    assert lay_out(tmp_path, "0::/\n", **group_2("", limit, 8 * GIB)).read() == (6 * GIB, 8 * GIB)


def test_a_disk_has_what_is_free_for_users_and_a_path_that_is_not_there_none(tmp_path):
    left, total = disk_room(str(tmp_path))
    assert 0 < left < total
    assert disk_room(str(tmp_path / "nowhere")) is None
