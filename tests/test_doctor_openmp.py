"""`doctor` finds two OpenMP runtimes in one process."""

from __future__ import annotations

from attendless.measure import doctor


def test_runtimes_are_told_apart() -> None:
    loaded = ["/lib/libc.so.6", "/t/torch.libs/libgomp-98b21ff3.so.1", "/usr/lib/libgomp.so.1", "/usr/lib/libgomp.so.1"]
    assert doctor.openmp_runtimes(loaded) == ["/t/torch.libs/libgomp-98b21ff3.so.1", "/usr/lib/libgomp.so.1"]
    assert doctor.openmp_runtimes(["/lib/libompd.so", "/x/libiomp5.so"]) == ["/x/libiomp5.so"]


def test_here_there_is_one() -> None:
    (found,) = [finding for finding in doctor.examine() if finding.name == "OpenMP runtimes"]
    assert found.ok
