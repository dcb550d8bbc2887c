"""The experiment file: reading, overrides, interpolation, and the sentences for everything that can be wrong."""

# promise: values of the environment are written nowhere
# promise: no silent fallback; errors name place, value and fix, before anything starts

import json
import string
from pathlib import Path

import pytest
import yaml
from damage import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pipeline import registry
from pipeline.commands.invocation import way_on
from pipeline.errors import ExperimentError, Problem, UsageError
from pipeline.experiment import keys, problems
from pipeline.experiment.load import ExperimentFile, config_hash, flatten, load, to_yaml
from pipeline.experiment.problems import experiment_json_schema
from pipeline.experiment.references import explain_unknown, fill_in
from pipeline.experiment.schema import Experiment, Metric
from pipeline.experiment.train import Optimizer, Train
from pipeline.experiment.values import Component

GOOD = """\
# a comment
name: good
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 2}
data: {_target_: torch.nn.Identity}
loss: {_target_: torch.nn.CrossEntropyLoss}
optimizer:
  _target_: torch.optim.SGD
  lr: 1e-3
scheduler:
  _target_: torch.optim.lr_scheduler.CosineAnnealingLR
  T_max: ${total_steps}
train:
  epochs: 2
  global_batch_size: 16
hooks:
- _target_: torch.nn.Flatten
  size: 2
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str | bytes, *overrides: str) -> ExperimentFile:
    content = text.encode() if isinstance(text, str) else text
    Path("e.yaml").write_bytes(content)
    return load("e.yaml", overrides)


def problems_of(text: str | bytes, *overrides: str) -> list[str]:
    with pytest.raises(ExperimentError) as caught:
        read(text, *overrides)
    return [str(problem) for problem in caught.value.problems]


def filled(file: ExperimentFile, argument: str) -> object:
    """An argument of the data as it is built."""
    return fill_in(file.experiment).data.arguments[argument]


class TestReading:
    def test_values_reach_the_experiment(self) -> None:
        experiment = read(GOOD).experiment
        assert experiment.model.target == "torch.nn.Linear"
        assert experiment.model.arguments == {"in_features": 4, "out_features": 2}
        assert experiment.optimizer.arguments == {"lr": 0.001}
        assert experiment.hooks[0].arguments == {"size": 2}

    def test_a_byte_order_mark_windows_line_ends_and_a_tab_in_a_comment_do_no_harm(self) -> None:
        assert read(GOOD.replace("# a comment", "#\ta comment")).experiment == read(GOOD).experiment
        assert read(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode()).experiment == read(GOOD).experiment

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("resnte.yml", r"resnte\.yml: there is no such file; did you mean resnet\.yaml\?"),
            ("quite-different-name", r"no such file; there are resnet\.yaml"),
            ("bbbb.yaml", r"no such file; did you mean experiments/bbbbb\.yaml\?"),
            ("experiments", "^experiments is a folder, not an experiment file; there are experiments/aaaaa"),
            ("experiments/nofile.yaml", r"no such file; there are experiments/aaaaa\.yaml, .* and 1 more$"),
            ("a" * 300, "a: can't be read: File name too long"),
            ("a\0b", "can't be read"),
        ],
    )
    def test_a_name_that_is_no_file_is_answered_with_those_that_there_are(self, name: str, said: str) -> None:
        Path("experiments").mkdir()
        for file in ("resnet", *(f"experiments/{letter * 5}" for letter in "abcdef")):
            Path(f"{file}.yaml").write_text(GOOD)
        with pytest.raises(UsageError, match=said):
            load(name)

    def test_merge_keys_and_aliases_work_and_own_keys_win(self) -> None:
        merged = "metrics: {a: {<<: [&x {_target_: a.b, n: 1}, &y {n: 2, o: 3}]}}\n"
        extra = "parallel: &p {strategy: ddp, workers: 2}\n"
        experiment = read(extra + GOOD + merged + "benchmark: {baseline: {<<: *p, workers: 4}}\n").experiment
        assert experiment.metrics["a"].arguments == {"n": 1, "o": 3}
        assert (experiment.benchmark.baseline.strategy, experiment.benchmark.baseline.workers) == ("ddp", 4)

    def test_dates_and_times_stay_texts_and_an_argument_may_be_called_target(self) -> None:
        text = GOOD + "metrics: {a: {_target_: a.b, since: 2020-01-01, target: 3}}"
        experiment = read(text, "data.of=10:30", "data.to=1:02:03.5").experiment
        assert experiment.metrics["a"].target == "a.b"
        assert experiment.metrics["a"].arguments == {"since": "2020-01-01", "target": 3}
        assert experiment.data.arguments == {"of": "10:30", "to": "1:02:03.5"}


class TestNotYaml:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "e.yaml: is empty. An experiment starts with name: my-experiment"),
            ("# only a comment\n", "e.yaml: is empty. An experiment starts with name: my-experiment"),
            ("- a\n", "e.yaml: is a list; write sections such as model: and data:"),
            ("just text", "e.yaml: is 'just text' (a string); write sections such as model: and data:"),
            (b"a: \xff\xfe", "e.yaml:1: is not UTF-8 text (byte 4); save it as UTF-8"),
            ("a: 1\nb: \x01", "e.yaml:2: a character that is not allowed in text files. Save the file as UTF-8 text"),
            ("train:\n\tepochs: 1", "e.yaml:2: can't be read as YAML: while scanning for the next token: found c"),
            ("a: {b: 1\nc: 2", "e.yaml:2: can't be read as YAML: while parsing a flow mapping (line 1): expected ',' "),
            ("a: 1\nb: {c: ${d}}", 'e.yaml:2: inside {} and [] a ${...} needs quotes; write "${...}"'),
            ("a: 1\nb: 'x\nc: 2", "e.yaml:3: can't be read as YAML: while scanning a quoted scalar (line 2): "),
            ("a:\n  b: 1\n   c: 2", "e.yaml:3: can't be read as YAML: mapping values are not allowed here"),
            ("a:\n   b: 1\n  c: 2", "e.yaml:3: can't be read as YAML: while parsing a block mapping (line 1): expecte"),
            ("a: 1\nb\n", "e.yaml:3: can't be read as YAML: while scanning a simple key (line 2): could not find expe"),
            ("a: *b", "e.yaml:1: can't be read as YAML: found undefined alias 'b'"),
            ("a: 1\n---\nb: 1", "e.yaml:2: can't be read as YAML: expected a single document in the stream (line 1): "),
            ("a: @b", "e.yaml:1: can't be read as YAML: while scanning for the next token: found character '@'"),
            ("a: 1\nb: !!python/name:os.system x",
             "e.yaml:2: b: the YAML tag !!python/name:os.system is not supported"),
            ("a: {On: x}", "e.yaml:1: a: the key On is not a string; put it in quotes"),
            ("a: {1: x}", "e.yaml:1: a: the key 1 is not a string; put it in quotes"),
            ("a: !!int x", "e.yaml:1: a: 'x' is not an integer of at most 64 bits; put strings in quotes"),
            ("a: #ff0000", "e.yaml:1: a: is empty, since # starts a comment. Write '#ff0000', or null."),
            ("a: {<<: 3}", "e.yaml:1: a: <<: takes a mapping, e.g. <<: *defaults"),
            ("a: &a [*a]", "e.yaml:1: "),
            ("a: 1\nb: [0, no]", "e.yaml:2: b[1]: is no, which YAML 1.1 reads as false. Write false, "),
            ("a: 695e0514", "e.yaml:1: a: is 695e0514, which YAML 1.1 reads as .inf. Write .inf, or '695e0514' for"),
            ("a: 00e1", "e.yaml:1: a: is 00e1, which YAML 1.1 reads as 0.0. Write 0.0, or '00e1' for the text."),
            ("a: {cat:2, b: 1}", "e.yaml:1: a.cat:2: has no value. Put a space after the colon: cat: 2"),
            ("a: " + "[" * 1000, "e.yaml:1: nested deeper than 40 levels"),
        ],
    )  # fmt: skip
    def test_each_has_a_sentence_and_a_line(self, text: str | bytes, expected: str) -> None:
        assert any(problem.startswith(expected) for problem in problems_of(text))

    def test_values_that_yaml_misreads_come_with_all_other_problems(self) -> None:
        text = GOOD + "seed: 010\nlodaer: {}\nparallel: {workers: 0, timeout_s: 1e400}\nseed: 3\n"
        start = len(GOOD.splitlines())
        assert [problem.partition(" is ")[0].partition(";")[0] for problem in problems_of(text)] == [
            f"e.yaml:{start + 1}: seed:",
            f"e.yaml:{start + 4}: seed: set twice, first in line {start + 1}. Remove one of them.",
            f"e.yaml:{start + 2}: lodaer: unknown key",
            f"e.yaml:{start + 3}: parallel.workers:",
            f"e.yaml:{start + 3}: parallel.timeout_s:",
        ]


def _letters_apart(one: str, other: str) -> int:
    """Letters that differ; texts of different lengths differ in all of theirs."""
    return sum(a != b for a, b in zip(one, other, strict=True)) if len(one) == len(other) else len(one)


class TestSentences:
    MANY = """\
name: a b
seed: "5"
model: torch.nn.Linear
data: {target: x.y}
loader:
  pin_memory: yess
  collate: {_target_: foo}
optimizer: {_target_: torch.optim.SGD, a: "${trian.epochs}", b: [0.9], c: "${x", d: "???"}
epochs: 3
train:
  epochs: -1
  batchsize: 12
  clip_grad_norm: ${total_steps}
parallel: {strategy: dpp, device: gpu, workers: 1.5}
benchmark: {baseline: {workers: two}}
tracking: {uri: mlruns, log_model: maybe, experiment: "${oc.env:PIPELINE_NOT_SET}"}
zzz: 1
metrics: {accuracy: 3}
checkpoint:
"""

    def test_a_file_with_many_mistakes(self) -> None:
        found = problems_of(self.MANY, "trian.epochs=3", "optimizer.b[6]=2", "loader.num_wokers=1")
        rendered = "\n".join(found).replace(", ".join(registry.names("strategies")), "STRATEGIES")
        assert (
            rendered
            == """\
e.yaml:1: name: is 'a b' (a string); write the experiment's name: letters, digits, dot, dash and underscore
e.yaml:2: seed: is '5' (a string); write an integer of at least 0, without quotes \
(from the environment: ${oc.decode:${oc.env:NAME}})
e.yaml:3: model: is 'torch.nn.Linear' (a string); write _target_: torch.nn.Linear
e.yaml:4: data._target_: missing; write _target_: package.name instead of target
e.yaml:6: loader.pin_memory: is 'yess' (a string); write true or false or auto
e.yaml:7: loader.collate._target_: is 'foo' (a string); write _target_: package.name
e.yaml:8: optimizer.c: is '${x', an incomplete ${...}. Close the brackets, or write \\${ for a literal ${.
e.yaml:8: optimizer.d: has no value (???). Set a value.
e.yaml:9: epochs: unknown key; did you mean train.epochs?
e.yaml:11: train.epochs: is -1 (an integer); write an integer greater than 0 or null
e.yaml:12: train.batchsize: unknown key; did you mean global_batch_size?
e.yaml:13: train.clip_grad_norm: ${total_steps} has no value until the data is loaded. \
Use it only in the arguments of scheduler, optimizer and other components.
e.yaml:14: parallel.strategy: is 'dpp' (a string); write one of STRATEGIES; did you mean ddp?
e.yaml:14: parallel.device: is 'gpu' (a string); write one of auto, cpu, cuda
e.yaml:14: parallel.workers: is 1.5 (a number); write an integer greater than 0, or [minimum, maximum]
e.yaml:15: benchmark.baseline.strategy: missing; parallel strategy of this configuration
e.yaml:15: benchmark.baseline.workers: is 'two' (a string); write an integer greater than 0 or null
e.yaml:16: tracking.uri: is 'mlruns' (a string); MLflow no longer stores runs in plain folders. \
Use sqlite:///mlflow.db or a server's http address.
e.yaml:16: tracking.log_model: is 'maybe' (a string); write true or false
e.yaml:16: tracking.experiment: is '${oc.env:PIPELINE_NOT_SET}'; the environment variable PIPELINE_NOT_SET is not set. \
Set it, or write ${oc.env:PIPELINE_NOT_SET,default}.
e.yaml:17: zzz: unknown key; an experiment takes extends, name, seed, model, data, sampler, loader, loss, task, \
metrics, optimizer, scheduler, optimizers, schedulers, hooks, train, checkpoint, parallel, benchmark, tracking, sweep
e.yaml:18: metrics.accuracy: is 3 (an integer); write _target_: package.name
e.yaml:19: checkpoint: is empty; write a mapping with keys from every_steps, every_minutes, keep, best, mode, directory
command line: optimizer.b[6]=2: optimizer.b[6]: optimizer.b has no entry 6. It has 1 entries, counted from 0.
command line: trian.epochs=3: trian: unknown key; did you mean train?
command line: loader.num_wokers=1: loader.num_wokers: unknown key; did you mean num_workers?"""
        )

    def test_a_missing_section_shows_the_file_and_a_contradiction_its_line(self) -> None:
        text = GOOD.replace("loss: {_target_: torch.nn.CrossEntropyLoss}\n", "")
        assert problems_of(text) == ["e.yaml: loss: missing. Set a loss, or a task that computes the loss."]
        found = problems_of(GOOD.replace("size: 16", "size: 2"), "parallel.workers=4")
        assert found[0].startswith("e.yaml:14: train.global_batch_size: 2 samples cannot be split over 4 workers")

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("checkpoint: 3",
             "checkpoint: is 3 (an integer); write a mapping with keys from every_steps, every_minutes, keep, best"),
            ("loader: {num_workers: true}", "loader.num_workers: is true (a boolean); write an integer of at least 0"),
            ("parallel: {options: []}", "parallel.options: is a list; write a mapping"),
            ("parallel: {start_timeout_s: 0}", "parallel.start_timeout_s: is 0 (an integer); write a number greater"),
            ("parallel: {address: 3}", "parallel.address: is 3 (an integer); write a string or null"),
            ("parallel: {launcher: ryy}", "parallel.launcher: is 'ryy' (a string); write one of "),
            ("tracking: {log_model: 12}", "tracking.log_model: is 12 (an integer); write true or false"),
            ("metrics: [1]", "metrics: is a list; write a mapping"),
            ("task: null\nloader: {num_workers: {}}", "loader.num_workers: is a mapping; write an integer of at leas"),
            ("global-batch-size: 3", "global-batch-size: unknown key; did you mean train.global_batch_size?"),
            ("momentum: 0.9", "momentum: unknown key; did you mean optimizer.momentum?"),
        ],
    )  # fmt: skip
    def test_each_kind_of_mistake(self, line: str, expected: str) -> None:
        (problem,) = problems_of(line + "\n" + GOOD)
        assert problem.partition(": ")[2].startswith(expected)

    def test_long_values_are_cut(self) -> None:
        assert len(problems_of(GOOD.replace("epochs: 2", f"epochs: {'x' * 5000}"))[0]) < 200
        assert problems_of(GOOD, f"name={'a' * 101}") == [
            f"command line: name={'a' * 101}: name: is 101 characters long; write at most 100"
        ]

    @settings(max_examples=examples(60), deadline=None)
    @given(st.data())
    def test_one_wrong_letter_in_a_key_finds_the_key(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([key for key in problems.all_keys() if len(key.rpartition(".")[2]) > 4]))
        *section, name = keys.split(key)
        at = data.draw(st.integers(0, len(str(name)) - 1))
        typo = str(name)[:at] + data.draw(st.sampled_from(string.ascii_lowercase)) + str(name)[at + 1 :]
        assume(typo not in problems.fields_at(section))
        like = [field for field in problems.fields_at(section) if _letters_apart(str(field), typo) == 1]
        with pytest.raises(ExperimentError) as caught:
            read(GOOD, f"{keys.join((*section, typo))}=1")
        found = [p.message for p in caught.value.problems if p.key == keys.join((*section, typo))]
        assert found[0] in {
            f"unknown key; did you mean {field}?" for field in like
        }  # apus is as near to cpus as to gpus
        assert len(found) == 1
        assert name in like


class TestOverrides:
    def test_values_are_yaml_and_keys_reach_everywhere(self) -> None:
        of_entry = ["hooks[0].size=4", "hooks.0._target_=torch.nn.Unflatten"]
        overrides = ["train.epochs=3", *of_entry, "train.lr_scaling.rule=sqrt"]
        experiment = read(GOOD, *overrides, "tracking.uri=http://host:5000", "optimizer.nesterov=true").experiment
        assert experiment.train.epochs == 3
        assert [entry.target for entry in experiment.hooks] == ["torch.nn.Unflatten"]
        assert experiment.hooks[0].arguments == {"size": 4}
        assert experiment.train.lr_scaling.rule == "sqrt"
        assert experiment.tracking.uri == "http://host:5000"
        assert experiment.optimizer.arguments == {"lr": 0.001, "nesterov": True}

    def test_a_section_is_replaced_as_a_whole(self) -> None:
        experiment = read(GOOD, "optimizer={_target_: torch.optim.Adam}", "scheduler=null").experiment
        assert experiment.optimizer == Optimizer(target="torch.optim.Adam")
        assert experiment.scheduler is None

    def test_interpolation_sees_overrides(self) -> None:
        text = GOOD.replace("lr: 1e-3", "lr: ${train.epochs}")
        for overrides, value in ((["train.epochs=7"], 7), (["train.epochs=${seed}", "seed=4"], 4)):
            optimizer = fill_in(read(text, *overrides).experiment).optimizer
            assert optimizer is not None
            assert optimizer.arguments == {"lr": value}

    @pytest.mark.parametrize(
        "override", ["train.epochs", "=3", "=", "", "train .epochs=3", "a..b=1", "a[x]=1", "[0]=1"]
    )
    def test_a_malformed_override_shows_the_right_form(self, override: str) -> None:
        with pytest.raises(
            UsageError, match=r"is not an override. Write key=value without spaces, e\.g\. train\.epochs=3"
        ):
            read(GOOD, override)

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("train.epoch=3", "train.epoch: unknown key; did you mean epochs?"),
            ("train.epochs=abc", "train.epochs: is 'abc' (a string); write an integer greater than 0 or null"),
            ("name.x=1", "name.x: name is 'good' (a string). Keys inside it cannot be set."),
            ("hooks.x=1", "hooks.x: hooks has no entry x. It has 1 entries, counted from 0."),
            ("model={a: 1, a: 2}", "model.a: set twice, first in line 1. Remove one of them."),
            ("train.epochs=", """train.epochs: has no value. Write null for none, or "''" for an empty text."""),
            (
                "name=[1",
                "name: can't be read as YAML: while parsing a flow sequence (line 1): "
                "expected ',' or ']', but got '<stream end>'",
            ),
            ("train.epochs=${sed}", "train.epochs: is '${sed}'; there is no key sed; did you mean seed?"),
            ("model=torch.nn.Linear", "model: is 'torch.nn.Linear' (a string); write _target_: torch.nn.Linear"),
            ("seed=010", """seed: is 010, which YAML 1.1 reads as 8. Write 8, or "'010'" for the text."""),
            ("seed=1_0", """seed: is 1_0, which YAML 1.1 reads as 10. Write 10, or "'1_0'" for the text."""),
            ("data.color=#ff0000", """data.color: # starts a comment in YAML. Put the value in quotes: "'#ff0000'\""""),
            ("name=a #b", """name: # starts a comment in YAML. Put the value in quotes: "'a #b'\""""),
            ("data.weights={cat:2}", "data.weights.cat:2: has no value. Put a space after the colon: cat: 2"),
            ("data.folder=${HOME}",
             "data.folder: is '${HOME}'; there is no key HOME. Write ${oc.env:HOME} for the environment variable."),
        ],
    )  # fmt: skip
    def test_a_problem_names_the_override(self, override: str, expected: str) -> None:
        assert problems_of("seed: 1\n" + GOOD, override) == [f"command line: {override}: {expected}"]


class TestInterpolation:
    def test_the_environment_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EPOCHS", "5")
        text = GOOD.replace("epochs: 2", "epochs: ${oc.decode:${oc.env:EPOCHS}}")
        assert read(text).experiment.train.epochs == 5
        assert read(GOOD, "name=${oc.env:PIPELINE_NOT_SET,fallback}").experiment.name == "fallback"

    def test_values_of_the_environment_are_not_interpreted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRICKY", "${oc.env:HOME}")
        (problem,) = problems_of(GOOD, "checkpoint.directory=${oc.env:TRICKY}")
        assert "is '${oc.env:TRICKY}'. Only arguments of components may contain ${" in problem
        assert filled(read(GOOD, "data.x=${oc.env:TRICKY}"), "x") == "${oc.env:HOME}"
        assert explain_unknown("${oc.env:HOME}") == ""
        assert filled(read(GOOD, r"data.x='\${seed}'"), "x") == "${seed}"

    @pytest.mark.parametrize(
        ("written", "shown", "value"),
        [
            ("${oc.env:DB}", "${oc.env:DB}", "hunter2"),
            ("postgres://me:${oc.env:DB}@host", "postgres://me:${oc.env:DB}@host", "postgres://me:hunter2@host"),
            ("${ oc.env: DB , none}", "${oc.env:DB,none}", "hunter2"),
            ("${oc.env:DB,${oc.env:OTHER}}", "${oc.env:DB,${oc.env:OTHER}}", "hunter2"),
            ("${oc.env:NO,${oc.env:DB}}", "${oc.env:NO,${oc.env:DB}}", "hunter2"),
            ("${oc.env:${model.which}}", "${oc.env:DB}", "hunter2"),
            ("${model.dsn}", "me:${oc.env:DB}", "me:hunter2"),
            (r"${oc.env:NO,'it\'s, \\'}", r"${oc.env:NO,it's, \}", "it's, \\"),
            ("${oc.env:NO,'true'}", "${oc.env:NO,true}", "true"),
            ("${oc.env:NO,null}", "${oc.env:NO,None}", None),
            ("${oc.env:COUNT}", "${oc.env:COUNT}", "8"),
            ("${oc.decode:${oc.env:DB}}", "${oc.decode:${oc.env:DB}}", "hunter2"),
            ("${oc.decode:${oc.env:COUNT}}", "8", 8),
        ],
    )
    def test_what_comes_from_the_environment_stays_a_reference_in_all_that_is_written(
        self, monkeypatch: pytest.MonkeyPatch, written: str, shown: str, value: object
    ) -> None:
        monkeypatch.setenv("DB", "hunter2")
        monkeypatch.setenv("COUNT", "8")
        text = GOOD.replace("in_features: 4", "which: DB, dsn: 'me:${oc.env:DB}'") + "sampler: {_target_: lab.order}\n"
        arguments = [f"{key}={json.dumps(written)}" for key in ("data.inner.own", "sampler.own", "optimizer.own")]
        file = read(text, *arguments, "tracking.tags.own=${oc.env:DB}")
        experiment = file.experiment

        flat = flatten(experiment)
        assert {flat["data.inner.own"], flat["sampler.own"], flat["optimizer.own"]} == {shown}
        assert flat["tracking.tags.own"] == "${oc.env:DB}"
        assert "hunter2" not in experiment.model_dump_json() + to_yaml(experiment) + str(flat)
        assert filled(file, "inner") == {"own": value}
        assert read(to_yaml(experiment)).experiment == experiment
        swept = read(GOOD, "sweep.parameters.data.x.grid=['${oc.env:DB}']")  # and so do the values of a sweep
        assert swept.experiment.sweep is not None
        (candidate,) = swept.experiment.sweep.parameters["data.x"].candidates
        assert swept.vary({"data.x": candidate}).experiment.data.arguments["x"] == candidate == "${oc.env:DB}"

    def test_the_command_that_continues_a_run_has_no_password(self) -> None:
        command = way_on(["run"], file=read(GOOD, "tracking={uri: http://me:hunter2@host, tags: {}}"), run="r")
        assert command.endswith("pipeline run e.yaml 'tracking={uri: http://host, tags: {}}' --resume r")
        (problem,) = problems_of(GOOD, "tracking.uri=http://me:hunter2@ho st")
        assert problem.startswith("command line: tracking.uri=http://ho st: tracking.uri: is 'http://ho st'")

    def test_keys_that_the_project_reads_itself_have_the_value(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ROOT", "/here")
        monkeypatch.setenv("TARGET", "lab.data")
        file = read(GOOD, "data.x=${oc.env:ROOT}", "checkpoint.directory=${data.x}/c", "data._target_=${oc.env:TARGET}")
        assert file.experiment.checkpoint.directory == "/here/c"
        assert file.experiment.data.target == "lab.data"

    def test_runtime_values_stay_in_component_arguments(self) -> None:
        experiment = read(
            GOOD, "scheduler.n=e${total_steps}-${world_size}", "scheduler.l=['${steps_per_epoch}']"
        ).experiment
        assert experiment.scheduler is not None
        assert experiment.scheduler.arguments == {
            "T_max": "${total_steps}",
            "n": "e${total_steps}-${world_size}",
            "l": ["${steps_per_epoch}"],
        }

    @pytest.mark.parametrize(
        "key", ["name", "tracking.directory", "parallel.options.x", "scheduler._target_", "metrics"]
    )
    def test_runtime_values_elsewhere_are_explained(self, key: str) -> None:
        (problem,) = problems_of(GOOD, f"{key}=a${{world_size}}")
        assert f"{key}: ${{world_size}} has no value until the data is loaded. Use it only in the arguments" in problem

    def test_the_data_cannot_know_its_own_length(self) -> None:
        (problem,) = problems_of(GOOD, "data.n=${total_steps}")
        assert problem.endswith("data.n: ${total_steps} has no value until the data is loaded. Use a number instead.")
        assert read(GOOD, "data.n=${world_size}").experiment.data.arguments == {"n": "${world_size}"}

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("${train.epoch}", "there is no key train.epoch; did you mean train.epochs?"),
            ("${total_step}", "there is no key total_step; did you mean total_steps?"),
            ("${model.x}", "Recursive interpolation detected"),
            ("${nope:1}", "this resolver does not exist. Use ${section.key}, or ${oc.env:NAME}"),
            ("${model.open}", "Missing mandatory value: model.open"),
            ("a${", "an incomplete ${...}. Close the brackets, or write \\${ for a literal ${."),
            ("${oc.decode:'[a'}", "missing BRACKET_CLOSE at '<EOF>'"),
            ("${oc.decode:'[Recursive interpolation'}", "missing BRACKET_CLOSE at '<EOF>'"),
        ],
    )
    def test_what_cannot_be_resolved(self, value: str, expected: str) -> None:
        found = problems_of(GOOD, f"model.x={json.dumps(value)}", "model.open='???'")
        assert len(found) == 2
        assert expected in found[0]

    def test_a_section_inside_itself(self) -> None:
        reason = "Interpolation to parent node detected"
        assert problems_of(GOOD, "model.a=${model}") == [
            f"command line: model.a=${{model}}: model.a: is '${{model}}'; {reason}"
        ]
        mutual = problems_of(GOOD, "model.a=${optimizer}", "optimizer.b=${model}")
        assert any("it refers to itself" in problem for problem in mutual)


class TestPlaces:
    @pytest.mark.parametrize(
        ("key", "place"),
        [
            ("name", "e.yaml:2"), ("train.epochs", "e.yaml:13"), ("train.precision", "e.yaml:12"),
            ("model.in_features", "e.yaml:3"), ("hooks[0].size", "e.yaml:17"), ("hooks.0.size", "e.yaml:17"),
            ("hooks[0].count", "e.yaml:16"), ("parallel.strategy", "e.yaml"), ("", "e.yaml"),
            ("seed", "command line: seed=3"), ("optimizer.lr", "command line: optimizer={_target_: a.b}"),
            ("benchmark.steps", "command line: benchmark.steps=2"),
        ],
    )  # fmt: skip
    def test_locate(self, key: str, place: str) -> None:
        assert read(GOOD, "seed=3", "optimizer={_target_: a.b}", "benchmark.steps=2").places.locate(key) == place

    def test_explain_fills_places_and_sorts(self) -> None:
        file = read(GOOD)
        error = file.explain([Problem("train.epochs", "b"), Problem("name", "a"), Problem("model.x", "c", "elsewhere")])
        assert str(error) == "e.yaml:2: name: a\nelsewhere: model.x: c\ne.yaml:13: train.epochs: b"

    def test_the_path_is_shown_as_it_was_written(self, tmp_path: Path) -> None:
        read(GOOD)
        assert load("./e.yaml").places.locate("name") == "./e.yaml:2"
        assert load(tmp_path / "e.yaml").places.locate("name") == f"{tmp_path}/e.yaml:2"


class TestSummary:
    def test_flat_parameters(self) -> None:
        flat = flatten(read(GOOD).experiment)
        assert flat["train.epochs"] == "2"
        assert flat["hooks[0]._target_"] == "torch.nn.Flatten"
        assert flat["loader.persistent_workers"] == "true"
        assert flat["metrics"] == "{}"
        assert flat["task"] == "null"
        assert flat["model._target_"] == "torch.nn.Linear"

    def test_the_hash_depends_on_values_alone(self) -> None:
        first, *rest = GOOD.splitlines()[1:]
        reordered = "\n".join([*rest, first])
        assert config_hash(read(reordered).experiment) == config_hash(read(GOOD).experiment)
        assert config_hash(read(GOOD, "seed=1").experiment) != config_hash(read(GOOD).experiment)
        assert len(config_hash(read(GOOD).experiment)) == 12

    def test_the_schema_describes_every_key_and_refuses_others(self) -> None:
        schema = experiment_json_schema()
        Draft202012Validator.check_schema(schema)
        Draft202012Validator(schema).validate(yaml.safe_load(GOOD))
        assert not Draft202012Validator(schema).is_valid({**yaml.safe_load(GOOD), "epochs": 1})
        assert "_target_" in schema["$defs"]["Component"]["properties"]
        assert "ddp" in schema["$defs"]["Parallel"]["properties"]["strategy"]["enum"]
        assert all(problems.schema_at(keys.split(key)).get("description") for key in problems.all_keys())


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12) | st.sampled_from(
    [
        "1e-3", "695e0514", "a\x85b\u2028c", "2020-01-01", "no", "${seed}", "\\${seed}", "${total_steps}", "<<",
        "017", "1:30", "~",
    ]
)  # fmt: skip
scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | texts
names = st.text(string.ascii_lowercase, min_size=1, max_size=6)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(names, v, max_size=3), max_leaves=6)
components = st.builds(
    lambda arguments: Component.model_validate({"_target_": "torch.nn.Linear", **arguments}),
    st.dictionaries(names, values, max_size=3),
)
metrics = st.builds(
    lambda component, on: Metric.model_validate({**component.model_dump(), "on": on}),
    components,
    st.sampled_from([["validation"], ["train", "validation"]]),
)
experiments = st.builds(
    Experiment,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    seed=st.integers(0, 2**31),
    model=components,
    data=st.just(Component(target="torch.nn.Identity")),
    loss=components,
    optimizer=components.map(lambda component: Optimizer.model_validate(component.model_dump())),
    scheduler=st.none() | components,
    metrics=st.dictionaries(names, metrics, max_size=2),
    train=st.builds(Train, epochs=st.integers(1, 9), global_batch_size=st.integers(1, 999)),
)


class TestRoundTrips:
    @settings(max_examples=examples(60), deadline=None)
    @given(experiments)
    def test_through_json(self, experiment: Experiment) -> None:
        assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment

    @settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(experiments)
    def test_through_yaml(self, experiment: Experiment) -> None:
        again = read(to_yaml(experiment)).experiment
        assert again == experiment
        assert config_hash(again) == config_hash(experiment)
