"""Random streams: what a key gives must never change, or no run could be resumed or repeated."""

import hashlib

import numpy as np

from student.data.streams import stream


def test_a_stream_is_philox_under_the_hash_of_its_names():
    digest = hashlib.sha256(b"7\x1frollout\x1f3\x1fabc").digest()
    philox = np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], np.uint64)))
    ours = stream(7, "rollout", 3, "abc")
    assert (ours.integers(0, 2**52, 100) == philox.integers(0, 2**52, 100)).all()
    assert (ours.permutation(50) == philox.permutation(50)).all()
    assert (ours.random(10) == philox.random(10)).all()
