"""The page cache: counted, emptied, filled, and never believed without proof.

Goal: the counts are the kernel's, cold is cold and warm is warm, what cannot be made or seen is said. Method: small
files, written, copied, evicted, partly read, mapped by another process, read by another user. Oracle: cachestat,
mincore and fincore (util-linux) against each other, findmnt. Controls: mincore on another user's evicted file lies; a
file whose mapping has ended can be evicted.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from anchorage.errors import MeasurementError
from anchorage.loading import pagecache
from anchorage.loading.pagecache import (
    ask_mincore,
    cold_kind,
    filesystem,
    hold,
    make_cold,
    make_warm,
    mapped_files,
    never_cold,
    residency,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not run: written for Linux's page cache")
PAGE, NOBODY = mmap.PAGESIZE, 65534
MAP_AND_WAIT = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
mapped[0]
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def write_file(tmp_path):
    if reason := never_cold(tmp_path):
        pytest.skip(f"not run: the tests' folder lies on {reason}")

    def write(n_bytes, name="file"):
        (tmp_path / name).write_bytes(os.urandom(n_bytes))
        return tmp_path / name

    return write


@pytest.fixture
def open_folder():
    """A folder that every user may enter; pytest's own are closed."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def fincore_pages(path):
    if not shutil.which("fincore"):
        pytest.skip("not run: fincore (util-linux) is not installed")
    said = subprocess.run(["fincore", "--raw", "--noheadings", "-o", "PAGES", path], capture_output=True, check=True)
    return int(said.stdout)


def read_pages(path, first, n_pages):
    """Read some pages and none ahead of them."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), n_pages * PAGE, first * PAGE)


def give_away(path):
    if os.geteuid() != 0:
        pytest.skip("not run: only root can give a file to another user")
    os.chown(path, NOBODY, NOBODY)


def as_nobody(function, *arguments, **more):
    """What a function answers, or the message of its MeasurementError, in a process of a user without rights."""
    if os.geteuid() != 0:
        pytest.skip("not run: only root can become another user")
    read_end, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            answer = vars(function(*arguments, **more) or residency(arguments[0]))
        except MeasurementError as error:
            answer = str(error)
        except BaseException as error:
            answer = f"unexpected: {error!r}"
        os.write(write_end, json.dumps(answer).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text)


@pytest.mark.parametrize("n_bytes", [1, PAGE, PAGE + 1, (4 << 20) + 17])
def test_all_ways_of_counting_agree(write_file, n_bytes):
    path, n_pages = write_file(n_bytes), -(-n_bytes // PAGE)
    for expected in (n_pages, 0, min(n_pages, 3)):
        if expected == 0:
            make_cold(path)
        elif expected < n_pages:
            read_pages(path, 0, 3)
        elif residency(path).resident == 0:
            read_pages(path, 0, n_pages)
        assert residency(path).pages == n_pages
        assert residency(path).resident == ask_mincore(path).resident == fincore_pages(path) == expected


def test_an_empty_file_lacks_nothing(write_file):
    path = write_file(0)
    assert (residency(path).pages, residency(path).fraction, ask_mincore(path).pages) == (0, 1.0, 0)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_without_cachestat_mincore_is_asked_of_ones_own_file(write_file, monkeypatch, code):
    def refuse(path):
        raise OSError(code, "no such call")

    path = write_file(1 << 20)
    expected = residency(path)
    monkeypatch.setattr(pagecache, "ask_cachestat", refuse)
    assert residency(path).by == "mincore"
    assert residency(path).resident == expected.resident == 256
    make_cold(path)
    read_pages(path, 7, 2)
    assert residency(path).resident == 2


def test_another_failure_is_not_hidden(write_file, monkeypatch):
    monkeypatch.setattr(pagecache, "_CACHESTAT_CALL", 0)  # read(2), which refuses these arguments
    with pytest.raises(OSError, match="Bad address"):
        residency(write_file(PAGE))


def test_a_copy_is_warm_and_make_cold_empties_it_and_make_warm_fills_it(write_file, tmp_path):
    path, copy = write_file(4 << 20), tmp_path / "copy"
    make_cold(path)
    subprocess.run(["cp", path, copy], check=True)
    assert residency(copy).fraction == 1  # and dirty
    make_cold(copy)
    assert fincore_pages(copy) == residency(copy).fraction == 0
    make_warm(copy)
    assert residency(copy).fraction == 1
    assert copy.read_bytes() == path.read_bytes()


def test_pages_that_another_process_has_touched_stay_and_it_is_named(write_file):
    path = write_file(1 << 20)
    other = subprocess.Popen(
        [sys.executable, "-c", MAP_AND_WAIT, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout.readline() == b"mapped\n"
    with pytest.raises(MeasurementError, match=f"cannot be made cold: .*of 256 pages stay.* end process {other.pid} "):
        make_cold(path)
    assert residency(path).resident > 0
    other.communicate()
    make_cold(path)
    assert residency(path).resident == 0


def test_what_is_held_stays_and_nothing_more_is_read(write_file):
    path = write_file(1 << 20)
    make_cold(path)
    read_pages(path, 5, 4)
    held = hold([path, write_file(0, "empty")])
    assert residency(path).resident == fincore_pages(path) == 4
    with pytest.raises(MeasurementError, match=f"4 of 256 pages stay.*process {os.getpid()} "):
        make_cold(path)
    held[0].close()
    make_cold(path)


def test_mapped_files_are_the_libraries_and_what_is_mapped(write_file):
    path = write_file(PAGE)
    assert str(path) not in mapped_files()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert str(path) in mapped_files()
    assert any(Path(name).name.startswith("libc.so") for name in mapped_files())


def test_a_file_in_memory_is_never_cold():
    shared = Path("/dev/shm")
    if not shared.is_dir() or filesystem(shared) != "tmpfs":
        pytest.skip("not run: /dev/shm is no tmpfs")
    with tempfile.NamedTemporaryFile(dir=shared) as file:
        file.write(b"x" * PAGE)
        file.flush()
        assert never_cold(file.name) == "tmpfs: never cold"
        with pytest.raises(MeasurementError, match="cannot be made cold: tmpfs: never cold"):
            make_cold(file.name)


@pytest.mark.parametrize("path", ["/", "/proc/self", "/dev", "/sys", tempfile.gettempdir()])
def test_the_filesystem_is_the_one_findmnt_names(path):
    if not shutil.which("findmnt"):
        pytest.skip("not run: findmnt (util-linux) is not installed")
    said = subprocess.run(["findmnt", "-n", "-o", "FSTYPE", "-T", path], capture_output=True, text=True, check=True)
    assert filesystem(path) == said.stdout.split()[-1]


def test_a_user_without_rights_measures_files_of_their_own(write_file, open_folder):
    path = open_folder / "own"
    path.write_bytes(os.urandom(1 << 20))
    give_away(path)
    if never_cold(path):
        pytest.skip(f"not run: {never_cold(path)}")
    assert as_nobody(residency, str(path))["resident"] == 256
    assert as_nobody(make_cold, str(path))["resident"] == 0
    assert as_nobody(make_warm, str(path))["resident"] == 256


def test_of_anothers_file_nothing_false_is_said(write_file, open_folder):
    path = open_folder / "roots"
    path.write_bytes(os.urandom(1 << 20))
    if never_cold(path):
        pytest.skip(f"not run: {never_cold(path)}")
    os.chmod(path, 0o644)
    make_cold(path)
    assert as_nobody(ask_mincore, str(path))["resident"] == 256  # the lie that is not to be believed
    for answer in (as_nobody(residency, str(path)), as_nobody(make_cold, str(path))):
        if isinstance(answer, dict):  # kernels of 2023 and 2024 tell everybody the truth
            assert answer["resident"] == 0
        else:
            assert f"its owner (user {os.geteuid()})" in answer
            assert f"not user {NOBODY}" in answer


def test_only_root_drops_the_whole_page_cache(open_folder):
    path = open_folder / "own"
    path.write_bytes(os.urandom(PAGE))
    give_away(path)
    if never_cold(path):
        pytest.skip(f"not run: {never_cold(path)}")
    assert "Set loading.drop_caches: false" in as_nobody(make_cold, str(path), drop_caches=True)


def test_dropping_writes_what_the_kernel_wants(write_file, tmp_path, monkeypatch):
    monkeypatch.setattr(pagecache, "_DROP_CACHES", tmp_path / "drop_caches")
    path = write_file(PAGE)
    make_cold(path)
    assert not (tmp_path / "drop_caches").exists()
    make_cold(path, drop_caches=True)
    assert (tmp_path / "drop_caches").read_text() == "3"


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu vme hypervisor lahf_lm\n", "guest-cold"),
        ("proc/cpuinfo", "processor\t: 0\nmodel name\t: hypervisor\nflags\t\t: fpu vme\n", "cold"),
        ("sys/hypervisor/type", "xen\n", "guest-cold"),
        ("sys/class/dmi/id/sys_vendor", "QEMU\n", "guest-cold"),
        ("sys/class/dmi/id/product_name", "VMware Virtual Platform\n", "guest-cold"),
        ("sys/class/dmi/id/sys_vendor", "Dell Inc.\n", "cold"),
        ("proc/device-tree/compatible", "linux,dummy-virt\0", "guest-cold"),
        ("etc/hostname", "anything\n", "cold"),
    ],
)
def test_a_guest_says_that_its_cold_is_a_guests(tmp_path, name, text, kind):
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert cold_kind(tmp_path) == kind
