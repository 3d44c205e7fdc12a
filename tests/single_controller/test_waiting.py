"""What is told of a worker that is dead, from what Ray reports of it."""

from hybridrl.single_controller.waiting import in_words

# as Ray 2.60 words it
REPORT = """The actor died unexpectedly before finishing this task.
	class_name: rollout-0
	actor_id: 5f6c2f1a8e2f6d2b5a3f4c0001000000
	pid: 19260
	name: job/rollout-0
	namespace: 7a4f
	ip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: {kind} Worker exit detail: {detail} Some common causes include: \
(1) the process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called."""


def test_a_process_that_is_killed_is_said_to_be():
    report = REPORT.format(kind="SYSTEM_ERROR", detail="Worker unexpectedly exits with a connection error code 2. End of file.")
    assert in_words(report).startswith("its process (19260 on 192.0.2.2) ended without a word: it was killed by a signal, crashed or")


def test_what_ray_knows_better_is_left_in_its_words_without_identifiers():
    said = in_words(REPORT.format(kind="USER_ERROR", detail="Worker exits with an exit code 4."))
    assert said.endswith("Worker exit type: USER_ERROR Worker exit detail: Worker exits with an exit code 4.")
    assert "pid: 19260" in said and not any(name in said for name in ("actor_id", "namespace", "OOM killer"))
