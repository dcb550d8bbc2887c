"""Sentences of results: a template for each state."""

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
STOPPED_EARLY = "{count} of them stopped early (ASHA)"
BEST = "trial {number}: {metric} {value} after {epochs}"
ITS_MODEL = "Its model is logged to MLflow"
BEST_IN_A_LINE = "Best: trial {number} of {total}, {metric} {value} ({values})"
ALL_NAN = "{metric} is NaN in all completed trials, so there is no best trial"
NONE_COMPLETED = "No trial completed, so there is no best trial"
LAST_VALUES = "{metric} is the value after the trial's last epoch."
TRIAL_FAILED = "trial {number} failed: {message}"
TRIALS_LEFT = "{left} of {total} trials are left; --resume continues them"
