"""A run whose checkpoints lie in S3 goes on from there."""

# promise: random kills, SIGTERM, damaged checkpoints, three ranks, S3

import random
from collections.abc import Callable

from attempts import DDP, STEPS, Attempt, Undisturbed, check
from checkpointed import steps
from s3 import BUCKET, S3, SECRET

from pipeline.protocol.events import Resumed
from pipeline.train.storage import FILE_NAME, Storage, folder_name


def test_a_run_goes_on_from_there(
    s3: S3, attempt_in: Callable[..., Attempt], undisturbed: Undisturbed, draw: random.Random
) -> None:
    attempt = attempt_in(*DDP, f"checkpoint.directory=s3://{BUCKET}/runs", "checkpoint.every_steps=20")
    attempt.begin()
    attempt.wait_for_step(draw.randrange(30, STEPS - 20))
    attempt.kill()
    address = f"s3://{BUCKET}/runs/{attempt.folder.name}"
    assert steps(address)
    assert not (attempt.folder / "checkpoints").exists()
    ended = attempt.run("--resume")

    assert ended.code == 0, ended.output
    check(attempt, undisturbed)
    (resumed,) = attempt.all_of(Resumed)
    assert resumed.checkpoint.startswith(address)
    assert resumed.step > 0
    assert steps(address)[-1] == STEPS
    manifest = Storage(address).read(f"{folder_name(STEPS)}/{FILE_NAME}")
    written = [manifest, *(path.read_bytes() for path in attempt.folder.rglob("*") if path.is_file())]
    assert not [content for content in [*written, ended.output.encode()] if SECRET.encode() in content]
