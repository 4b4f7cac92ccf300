# SPDX-License-Identifier: Apache-2.0
"""Where memory groups are looked for, what is written to them and what the kernel counts.

The groups here are folders; test_cgroup.py has real ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from qsf_bench import memory_group

MB = 1 << 20


V1 = """\
24 1 0:21 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
30 24 0:27 / /sys/fs/cgroup/cpu rw,relatime shared:5 - cgroup cgroup rw,cpu
31 24 0:28 {root} /sys/fs/cgroup/memory rw,relatime shared:6 master:1 - cgroup cgroup rw,memory
40 24 0:29 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "30 24 0:27 {root} /sys/fs/cgroup rw,nosuid shared:5 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_groups_of_version_1_are_beside_all_others_or_inside_of_the_own() -> None:
    own = "4:memory:/jobs/7\n3:cpu:/other\n0::/\n"
    top = Path("/sys/fs/cgroup/memory")
    found = memory_group.group_folders(V1.format(root="/"), own)
    assert found == [(1, top), (1, top / "jobs/7"), (2, Path("/sys/fs/cgroup/unified"))]
    # A container sees a part of the tree, and its own group by its name outside of that.
    found = memory_group.group_folders(V1.format(root="/jobs"), own)
    assert found[:2] == [(1, top), (1, top / "7")]


def test_groups_of_version_2_are_beside_the_own() -> None:
    top = Path("/sys/fs/cgroup")
    own = "0::/user.slice/user-7.slice/app.scope\n"
    found = memory_group.group_folders(V2.format(root="/"), own)
    assert found == [(2, top / "user.slice/user-7.slice"), (2, top / "user.slice"), (2, top)]
    found = memory_group.group_folders(V2.format(root="/user.slice"), own)
    assert found == [(2, top / "user-7.slice"), (2, top)]
    assert memory_group.group_folders(V2.format(root="/"), "0::/\n") == [(2, top)]
    assert memory_group.group_folders(V2.format(root="/"), "0::/../other\n") == [(2, top)]
    assert memory_group.group_folders("", own) == []


def test_the_limit_is_of_memory_and_of_swap(tmp_path: Path) -> None:
    """Here, because where a limit cannot be set the tests in groups are skipped."""
    wanted = {
        1: {"memory.limit_in_bytes": str(MB), "memory.memsw.limit_in_bytes": str(MB)},
        2: {"memory.max": str(MB), "memory.swap.max": "0"},
    }
    for version, files in wanted.items():
        folder = tmp_path / str(version)
        folder.mkdir()
        group = memory_group.Group(version, folder)
        with pytest.raises(FileNotFoundError, match="no memory controller"):
            group.set_limit(MB)
        for name in (*files, "cgroup.procs"):
            (folder / name).write_text("max")
        group.set_limit(MB)
        assert {name: (folder / name).read_text() for name in files} == files
        (folder / list(files)[1]).unlink()  # a kernel without accounting of swap
        group.set_limit(MB)


def test_a_group_that_cannot_be_had_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_controller = tmp_path / "no-controller"
    no_controller.mkdir()
    places = [(1, tmp_path / "absent"), (1, no_controller)]
    monkeypatch.setattr(memory_group, "group_folders", lambda *_: places)
    with (
        pytest.raises(memory_group.CapError, match=r"run this as root.*Tried: .*No such file"),
        memory_group.memory_group(300 * MB),
    ):
        pass
    assert list(no_controller.iterdir()) == []
