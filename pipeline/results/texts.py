"""The sentences of results: a template for each state. What fills them is computed elsewhere, e.g. in `statements`."""

from collections.abc import Mapping

HEADLINES: Mapping[str, tuple[str, ...]] = {
    "faster": (
        "{name} {train} {value} as fast as {base}",
        "({level} confidence interval {low} to {high}; scaling efficiency {efficiency})",
    ),
    "faster, wide": (
        "{name} {train} {low} to {high} as fast as {base}",
        "({level} confidence interval; scaling efficiency {efficiency})",
    ),
    "slower": (
        "{name} {are} {slower} SLOWER than {base}",
        "({level} confidence interval {slower_low} to {slower_high} slower)",
    ),
    "slower, wide": ("{name} {are} {slower_low} to {slower_high} SLOWER than {base}", "({level} confidence interval)"),
    "inconclusive": (
        "Inconclusive: can't tell whether {name} {are} faster than {base}",
        "Measured {value} as fast; {level} confidence interval {low} to {high}, which includes 1.00x (equally fast)",
    ),
    "inconclusive, wide": (
        "Inconclusive: can't tell whether {name} {are} faster than {base}",
        "{level} confidence interval {low} to {high}, which includes 1.00x (equally fast)",
    ),
    "too noisy": ("Inconclusive: too noisy to measure whether {name} {are} faster than {base}",),
    "no interval": (
        "Inconclusive: can't tell whether {name} {are} faster than {base}",
        "Measured {value} as fast, without a confidence interval",
    ),
    "invalid": (
        "The speedup is not valid: {name} {do} not train the same model as {base}. Their losses differ by {first} "
        "within the first {steps} steps; rounding explains at most {tolerance}.",
    ),
}
"""The answer, by what the speedup shows."""
VERDICTS: Mapping[str, str] = {
    "faster": "{full}: {value} as fast as {base} ({level} CI {low} to {high})",
    "faster, wide": "{full}: {low} to {high} as fast as {base} ({level} CI)",
    "slower": "{full}: {slower} slower than {base} ({level} CI {slower_low} to {slower_high})",
    "slower, wide": "{full}: {slower_low} to {slower_high} slower than {base} ({level} CI)",
    "inconclusive": "{full}: inconclusive, {low} to {high} ({level} CI)",
    "inconclusive, wide": "{full}: inconclusive, {low} to {high} ({level} CI)",
    "too noisy": "{full}: inconclusive, too noisy to measure",
    "no interval": "{full}: inconclusive, {value} measured without a confidence interval",
    "invalid": "{full}: speedup not valid, loss differs from the baseline",
}
"""The answer in one line."""
COMPARISONS: Mapping[str, str] = {
    "faster": "{name} {are} {value} as fast as {base} ({level} CI {low} to {high}).",
    "faster, wide": "{name} {are} {low} to {high} as fast as {base} ({level} CI).",
    "slower": "{name} {are} {slower} slower than {base} ({level} CI {slower_low} to {slower_high}).",
    "slower, wide": "{name} {are} {slower_low} to {slower_high} slower than {base} ({level} CI).",
    "inconclusive": "{name} and {base} are equally fast within the noise ({level} CI {low} to {high}).",
    "inconclusive, wide": "Too noisy to tell whether {name} or {base} is faster ({level} CI {low} to {high}).",
    "too noisy": "Too noisy to measure whether {name} or {base} is faster.",
    "no interval": "{name} {were} measured {value} as fast as {base}, without a confidence interval.",
}
"""Comparisons of two rows other than with the baseline."""

REASONS: Mapping[str, str] = {
    "busy": "Other processes used {cores} CPU cores during the measurement",
    "few rounds": "Only {size} rounds fit into benchmark.time_budget_s (they took {took})",
    "noise": "The machine was too busy with other work",
    "rounds": "{size} rounds are too few for a speedup this close to 1x",
    "close": "The speedup is too close to 1x to measure on this machine",
    "repeats": "{size} repeats are too few for this much noise",
    "once": "It was measured once, so the noise is unknown",
    "no memory": "The baseline did not fit into memory next to the training, so they were not measured alternately",
    "apart": "The baseline was not measured alternately with the training",
}
"""Why a speedup is inconclusive."""
REMEDIES: Mapping[str, str] = {
    "longer": "Train again and measure longer (for about {longer}):",
    "longer, stop": "Stop them, train again and measure longer (for about {longer}):",
    "idle": "Train again on an idle machine:",
    "idle, stop": "Stop them, and train again on an idle machine:",
    "several": "Measure several times:",
    "more": "Measure more often:",
    "repeat": "Measure again on an idle machine:",
    "rounds": "Measure both in rounds:",
}
"""Remedies that would make it conclusive."""
UNMEASURED: Mapping[str, str] = {
    "option": "Speedup not measured ({option})",
    "one device": "Speedup not measured (DataParallel has one device here)",
    "same": "Speedup not measured (the baseline is the same training)",
    "interrupted": "Speedup not measured (the measurement was interrupted)",
    "failed": "Speedup not measured (the measurement failed, see the warning above)",
    "no baseline": "Speedup not measured (--no-baseline)",
    "baseline missing": "Speedup not measured (the baseline could not be measured)",
    "nothing else": "Speedup not measured (nothing but the baseline was measured)",
}
"""Why there is no speedup."""

LOSSES: Mapping[tuple[str, bool], str] = {
    ("same", True): "",
    ("same", False): "",
    ("drifts", True): "Loss equals the baseline's for {steps} steps, then drifts by up to {largest} (rounding).",
    ("drifts", False): "Loss equals the baseline's for {steps} steps, then one of the two is not a finite number.",
    ("explained", True): "Loss differs from the baseline's by up to {first} in the first {steps} steps: {reason}.",
    ("explained", False): "Loss is not finite (NaN or infinite) in the first {steps} steps, where {reason}.",
    ("differs", True): "Loss differs from the baseline's by up to {first} within the first {steps} steps. Rounding "
    "explains at most {tolerance}. The two do not train the same model, so ignore the speedup.",
    ("differs", False): "A loss is not finite (NaN or infinite) within the first {steps} steps. The two do not train "
    "the same model, so ignore the speedup.",
}
"""Differences from the baseline's losses; False: a loss is not a finite number."""
CHECK = "Code in your model, loss or dataset that depends on the rank, or random numbers from your own generators"
"""Places to check if the loss differs and nothing explains it."""

STEP: Mapping[str, str] = {
    "sum": "Step time, {name} (ms): {total} total = {parts}",
    "about": "Step time, {name} (ms): {total} total. Its parts, timed one by one, are equal to it within the noise: "
    "{parts}",
    "noisy": "Step time, {name} (ms): {total} total ({low} to {high}). Its parts, timed one by one, do not add up to "
    "it within the noise: {parts}",
    "unknown": "Step time, {name}: {total} ms. Its parts could not be measured.",
}
"""The time of a step, by how its parts add up."""
PARTS_DO_NOT_ADD_UP = "{names}: the parts do not add up to the step; other work on the machine disturbed their timing."
STRAGGLER = "{name}: rank {rank} on {node} takes {ratio} the time of the other ranks."
LOST: Mapping[str, str] = {
    "exposed": "{ms} of each {step} ms step with {name} are exposed communication",
    "compute": "{ms} of each {step} ms step with {name} are compute, where an even share of {base}'s is {even}",
    "rest": "{ms} of each {step} ms step with {name} are optimizer and other, which more workers do not divide",
    "data": "{ms} of each {step} ms step with {name} are data loading",
    "unclear": "Where the {step} ms of a step with {name} go is unclear: its parts do not add up to it",
}
"""The part of a step that explains why more devices pay little."""

GOODPUT = "Goodput {percent}%: {steps} of {total} were spent in training steps{rest}."
SYNCHRONIZATION = (
    "Gradient synchronization took {ms} ms of each step, from the first bucket sent to the last received, "
    "{exposed} ms of it while nothing else was computed (exposed communication)."
)
SPIKES = "{spikes} of gradient synchronization cost {lost}: {worst}."
UNCOUNTED = "TFLOP/s and MFU are lower bounds: the operations of {names} are not counted."
BUSY = (
    "Other processes used {cores} CPU cores during the measurement. Train again on an idle machine for narrower "
    "intervals."
)
MICRO_BATCHES = (
    "{name}: {samples} at once did not fit into memory next to the training. Each step has {parts} micro-batches, as "
    "large as a worker's."
)
BUFFERS = "{statistics}, and only rank 0's copy is saved. Training in one process differs."
STOPPED_EARLY = "Training stopped early, after {steps} steps: {reason}."
UNSAVED = "{failed} could not be saved: {reason}."
NEWEST = "The latest checkpoint is from step {newest}, but the training ended at step {steps}."
NO_CHECKPOINT = "No checkpoint was saved, but the training ended at step {steps}."
BETTER_LOST = "{metric} may have been better in one of them."
OTHER_BATCHES = (
    "Other batch sizes: the global batch size is the batch size per device times the number of devices and of "
    "micro-batches. Losses are not comparable with the baseline's."
)
ESTIMATE = (
    "Estimated time: {samples} samples at this throughput plus the startup. Evaluation and checkpoints add to it."
)
TITLES: Mapping[str, str] = {
    "completed": "{name}: training completed ({epochs}{steps}; {hardware})",
    "stopped early": "{name}: training stopped early ({epochs}{steps}; {hardware})",
    "quick": "{name}: quick test passed ({workers}, {strategy}, {launcher}; {hardware})",
    "benchmark": "{name}: benchmark completed ({configurations}, {repeats}; {hardware})",
    "benchmark, interrupted": "{name}: benchmark interrupted ({configurations} measured; {hardware})",
}
QUICK = (
    "The whole training takes about {time}: {hours} device hours{price}",
    "Trained {steps} and timed the last {timed}, evaluated once and saved a checkpoint.",
    "{rate} samples/s, first step {start} after the launch{memory}. The speedup was not measured.",
)
"""The answer of ``--quick``."""
FASTEST = "Fastest: {name}, {rate} samples/s"
NOT_MEASURED = "not measured"
WHY_NOT_MEASURED = "{name} was not measured: {reason}."
NOT_BEGUN = "the benchmark ended before it was measured"
NO_MEMORY = "it does not fit into memory"
WIDE = "Some intervals are wide. Measure again on an idle machine, or with --repeats {repeats}."
PREDICTED = (
    "Predicted for a network of {gbit} Gbit/s and {us} us, {origin}, and gradients of {mb} MiB. Limited by {limits}."
)
"""Basis of predicted rows."""
CHECKED = "{name}: {measured} measured, {predicted} predicted ({error})"
UNCHECKED = "The prediction is not checked: no measured workers use this network."
NO_PREDICTION = "no speedup is predicted, because what a prediction needs could not be measured"
NO_NETWORK = (
    "--predict: no two workers can run here ({reason}), so the network cannot be measured. Give it, e.g. --network "
    "10Gbit,50us."
)
WITHOUT_SPEEDUP = "{name}: {rate} samples/s. {reason}"
WITHOUT_SPEEDUP_VERDICT = "{name}: {reached}; speedup not measured"
QUICK_VERDICT = "{name}: quick test passed; the whole training takes about {time}"


ADVICE: Mapping[str, tuple[str, str]] = {
    "larger batch": (
        "{exposed} ms of each {step} ms step with {name} are exposed communication. Not measured.",
        "A batch twice as large needs half as many synchronizations; check that the model trains as well.",
    ),
    "slow link": (
        "{exposed} ms of each {step} ms step with {name} are exposed communication, for {mb} MiB at about {gbit} "
        "Gbit/s. Not measured.",
        "Gradients lose precision; check that the model trains as well.",
    ),
    "straggler": (
        "It takes {ms} ms per step without waiting for other ranks, the other ranks {others} ms.",
        "Find out what slows rank {rank} on {node} down; all ranks wait for the slowest one.",
    ),
    "data wait": ("{wait} ms of each {step} ms step with {name} are data loading. Not measured.", ""),
    "data wait, no idle core": (
        "{wait} ms of each {step} ms step with {name} are data loading. Not measured.",
        "No core is idle, so DataLoader workers help only if loading waits for storage.",
    ),
    "slow data": (
        "{wait} ms of each {step} ms step with {name} are data loading.",
        "Speed up __getitem__: {loaders} for {cores} are too slow.",
    ),
}
"""Suggestions: the reason with the measurement, and the change in words."""

# compare: {a} and {b} are names of variants, {pairs} is e.g. "5 pairs"
BETTER_OR_WORSE = "{b} is {verdict} than {a}: {metric} {difference}, {pairs}"
EQUAL = "{a} and {b} are equal within {margin}: {metric} {difference}, {pairs}"
IDENTICAL = "{a} and {b} are identical: the same losses to the bit, {pairs}"
SAME_BUT_ROUNDING = (
    "{a} and {b} are identical but for rounding: no loss and no {metric} differs by more than {most}, {pairs}"
)
INCONCLUSIVE = "Inconclusive whether {b} is better than {a}: {metric} {difference}, {pairs}"
WOULD_DECIDE = "About {more} more would decide"
NO_ANSWER = "No pair of trainings can be compared"
SOONER = (
    "{b} reaches {metric} {target} {ratio} {word} than {a}{interval}: {rate} the samples per second, {samples} the "
    "samples; {hours}"
)
NOT_CLEARLY_SOONER = (
    "Inconclusive whether {b} reaches {metric} {target} sooner than {a}, {pairs}: {ratio} {word}{interval}, {rate} the "
    "samples per second, {samples} the samples; {hours}"
)
DEVICE_HOURS = "{share} {word} device hours"
NOT_REACHED = "{metric} {target} was not reached by {names}"
ONLY_REACHED = "The time is that of the {reached} of {pairs} in which all reached it, so it is not an answer"
TIMED = "The time counts training steps only, not the start, evaluations and checkpoints"
CLAIM = "This is about the luck of training (seeds) on this data. It does not cover other data."
EXTENDED = (
    "Extended after a look: {pairs} said before: {verdict}. Who adds pairs until the answer is clear is wrong more "
    "often than 5%"
)
SEVERAL = "{count} variants are compared with {a}: their intervals are wider, so that all answers hold together (Holm)"
SAME_DIFFERENCE = "All pairs have the same difference. Enough pairs make that an answer: six at 95%"
SKEWED = "The differences of the pairs are skewed, so the interval may be too narrow. Train more pairs"
NO_PARTNER = "Runs without a partner of the same seed have no answer. Train them with: pipeline run FILE seed=N"

# sweep: {number} is that of a trial, {values} are its values, {of} is e.g. "8 of 8 trials"
SWEPT = "{name}: {of} completed"
STOPPED_BY_ASHA = "{count} of them stopped early (ASHA)"
BEST = "trial {number}: {metric} {value} after {epochs}"
ITS_MODEL = "Its model is logged to MLflow"
BEST_IN_A_LINE = "Best: trial {number} of {total}, {metric} {value} ({values})"
ALL_NAN = "{metric} is NaN in all completed trials, so there is no best trial"
NONE_COMPLETED = "No trial completed, so there is no best trial"
LAST_VALUES = "{metric} is the value after the trial's last epoch."
TRIAL_FAILED = "trial {number} failed: {message}"
TRIALS_LEFT = "{left} of {total} trials are left; --resume continues them"
