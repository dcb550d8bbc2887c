"""Broken experiment files and overrides by the thousand: a message with a place, never a traceback, never a hang."""

# promise: no file, command line or journal ends in a traceback

import copy
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from damage import damaged, examples, places_in
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.errors import MOST_PROBLEMS, ExperimentError, Problem, UsageError
from pipeline.experiment.load import load
from pipeline.experiment.schema import Experiment
from pipeline.experiment.yaml_text import Dumper

GOOD = """\
name: good
seed: 3
model:
  _target_: torch.nn.Sequential
  args: [{_target_: torch.nn.Linear, in_features: 4, out_features: 2}, 1, [2.5, text]]
data: {_target_: torch.nn.Identity, root: "${tracking.directory}"}
loss: {_target_: torch.nn.CrossEntropyLoss}
metrics:
  accuracy: {_target_: torch.nn.Flatten}
optimizer:
  _target_: torch.optim.SGD
  lr: 1e-3
scheduler:
  _target_: torch.optim.lr_scheduler.CosineAnnealingLR
  T_max: ${total_steps}
train:
  epochs: 2
  global_batch_size: 16
  clip_grad_norm: 1.0
  lr_scaling: {rule: linear}
  activation_checkpointing: [layer1]
parallel: &main {strategy: ddp, launcher: torchrun, workers: 2, options: {x: 1}}
benchmark:
  baseline: {strategy: single}
  steps: 2
tracking: {uri: "sqlite:///m.db", directory: runs}
checkpoint: {keep: 1, best: validation/accuracy}
"""
TREE: dict[str, Any] = yaml.safe_load(GOOD)
PLACE = re.compile(r"e\.yaml:(\d+)")
SLOW = [HealthCheck.too_slow]  # this machine may be busy with something else
PATIENCE_S = 30.0  # For one file. It takes some 10 ms, one of the greatest allowed size some seconds.

odd_numbers = st.sampled_from(
    [0, -1, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.0, -0.0, 1e308, 1e-320, float("inf"), float("-inf"), float("nan")]
)
odd_texts = st.sampled_from(
    [
    "", " ", "~", "null", "true", "no", "0x", "1_0", "-", "a\tb", "\t", "a\nb", "\u202e", "\ufeff", "\x85",
    "\u2028", "\U0001f600", "é", "é" * 70, "x" * 5000, "a.b", "a..b", ".a", "[0]", "a[0]", "a=b", "<<", "*x",
    "&x", "!!python/none", "../..", "/dev/null", "sqlite://", "http://", "http://[", "file:x", "://", "s3://",
    "single", "ddp", "fp16", "auto", "validation/", "torch.nn.Linear", "torch", "os.system", "__main__.x",
    "torch.nn.Linear.__init__",
    ]
)  # fmt: skip
interpolations = st.sampled_from(
    [
    "${", "}", "$", "${}", "${ }", "${name}", "${seed}", "${.x}", "${..seed}", "${......x}", "${train}",
    "${model}", "${model.args}", "${model.args[0]}", "${model.args[9]}", "${model.args.x}",
    "${benchmark.baseline.strategy}", "${total_steps}", "${world_size}", "${steps_per_epoch}", "x${total_steps}",
    "${oc.env:HOME}", "${oc.env:PIPELINE_NOT_SET}", "${oc.env:}", "${oc.env:PIPELINE_TOKEN,x}", "${oc.decode:1}",
    "${oc.decode:'{'}", "${oc.decode:null}", "${oc.decode:${oc.env:HOME}}", "${oc.create:{a: 1}}",
    "${oc.select:seed}", "${oc.select:nope,3}", "${oc.deprecated:seed}", "${oc.dict.keys:train}",
    "${oc.dict.values:train}", "${oc.dict.keys:seed}", "${oc.nope:1}", "${a:b:c}", "${${name}}", "${${${name}}}",
    "\\${seed}", "\\\\${seed}", "???", "${train.epochs}${seed}", "${name", "${'name'}", "${\x00}", "${é}",
    "${a b}", "${[0]}", "${seed.x}", "${name.x}", "${tracking.uri}",
    ]
)  # fmt: skip
scalars = (
    st.none() | st.booleans() | st.integers(-3, 300) | odd_numbers | odd_texts | interpolations | st.text(max_size=8)
)
names = st.sampled_from(
    [
        "_target_", "name", "epochs", "workers", "args", "x", "strategy", "", " ", "a.b", "a[0]", "é", "0", "<<",
        "${seed}", "a=b",
    ]
) | st.text(max_size=5)  # fmt: skip
values = st.recursive(
    scalars,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(names, v, max_size=3),
    max_leaves=8,
)


PLACES = list(places_in(TREE))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


@st.composite
def broken_trees(draw: st.DrawFn) -> Any:
    """A valid experiment with some values of other types, without some keys, with keys that nobody knows."""
    tree = copy.deepcopy(TREE)
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from(PLACES))
        try:
            section, name = at(tree, path[:-1]), path[-1]
            old = section[name]
        except (KeyError, IndexError, TypeError):
            continue  # another change has taken it away
        if not isinstance(section, dict | list):
            continue
        match draw(st.sampled_from(["value", "delete", "rename", "wrap", "unwrap", "add", "move"])):
            case "value":
                section[name] = draw(values)
            case "delete":
                del section[name]
            case "rename" if isinstance(section, dict):
                section[draw(names)] = section.pop(name)
            case "wrap":
                section[name] = draw(st.sampled_from([[old], {"x": old}, {"_target_": old}, [[old]]]))
            case "unwrap" if isinstance(old, dict) and old:
                section[name] = next(iter(old.values()))
            case "add" if isinstance(old, dict):
                old[draw(names)] = draw(values)
            case "move":
                section[name] = copy.deepcopy(at(TREE, draw(st.sampled_from(PLACES))))
    return tree


SNIPPETS = [
    b"\t", b" ", b"  ", b"\n", b"\r", b"\r\n", b"\n\n", b":", b": ", b"- ", b"? ", b"#", b"|", b">", b"%", b"@",
    b"`", b",", b"{", b"}", b"[", b"]", b"'", b'"', b"\\", b"!", b"!!python/object:os.system x", b"!!binary x",
    b"!!set {a}", b"!!int x", b"!!timestamp 2020-01-01", b"!!float ", b"!!bool maybe", b"!!null x", b"!!omap [a: 1]",
    b"!!str ", b"!<x> ", b"! ", b"&a ", b"*a", b"*main", b"<<: *main", b"<<: 1", b"<<: [*main, 3]", b"&main ",
    b"&x {<<: *x}", b"&x [*x]", b"---\n", b"...\n", b"--- a\n", b"%YAML 1.2\n---\n", b"%TAG ! x\n", b"\xef\xbb\xbf",
    b"\xff\xfe", b"\x00", b"\x07", b"\xc3", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"\xc2\x85", b"\xf0\x9f\x98\x80",
    b"\x7f", b"\x1b[31m", b"1e999", b".nan", b"-.inf", b"9" * 5000, b"0o17", b"0b2", b"1:30:99", b"0x_",
    b"2020-99-99", b"${", b"${seed}", b"}", b"${${", b"\\${", b"[" * 300, b"{a: " * 120, b"- " * 200, b"? " * 60,
    b"\n1: 2\n", b"\nnull: 2\n", b"\n[a]: 2\n", b"\ntrue: 2\n", b"\nname: twice\n",
]  # fmt: skip


KINDS = ["insert", "insert", "insert", "flip", "cut", "repeat", "replace", "end", "indent"]


@st.composite
def broken_bytes(draw: st.DrawFn) -> bytes:
    """A valid file with snippets put in, bytes flipped, parts cut out, repeated, swapped."""
    return damaged(draw, GOOD.encode(), kinds=KINDS, snippets=SNIPPETS, most=4, longest=40)


def overridden_key() -> st.SearchStrategy[str]:
    def spelt(path: tuple[Any, ...], dotted: bool) -> str:
        text = str(path[0])
        for part in path[1:]:
            text += f"[{part}]" if isinstance(part, int) and not dotted else f".{part}"
        return text

    known = st.builds(spelt, st.sampled_from(PLACES), st.booleans())
    deeper = st.builds(
        lambda key, more: key + more,
        known,
        st.sampled_from([".x", "[0]", "[7]", ".x.y[0]", ".", "..x", "[", "[-1]", ".0"]),
    )
    return known | deeper | st.text("abx.[]0 \t=é", max_size=6)


override_values = (
    values.map(
        lambda value: (
            yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=10**9).removesuffix("\n...\n").strip()
        )
    )
    | scalars.map(str)
    | st.sampled_from(SNIPPETS).map(lambda raw: raw.decode(errors="surrogateescape"))
    | st.text(max_size=10)
)
overrides = st.builds("{}={}".format, overridden_key(), override_values) | st.text(max_size=12)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all examples of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("broken"))
        yield Path.cwd()


def outcome(content: bytes, *overrides: str) -> Experiment | ExperimentError | UsageError:
    """What a file is read as. Anything else than these three fails the test, and so do minutes and gigabytes."""
    path = Path("e.yaml")
    path.write_bytes(content)
    began, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found: Experiment | ExperimentError | UsageError
    try:
        found = load(path, overrides).experiment
    except (ExperimentError, UsageError) as error:
        found = error
    assert time.monotonic() - began < PATIENCE_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 500_000, "KB"
    assert [file.name for file in Path().iterdir()] == ["e.yaml"], "nothing is written"
    assert isinstance(found, Experiment) or str(found).strip()
    for problem in getattr(found, "problems", ())[:MOST_PROBLEMS]:
        check_problem(problem, content)
    return found


def check_problem(problem: Problem, content: bytes) -> None:
    """It has a message, and a place: a line that is there, the override, or the file as a whole."""
    assert problem.message
    assert len(problem.message) < 2000, "nobody reads that"
    assert "\n" not in problem.message
    assert "Error(" not in problem.message
    assert "Traceback" not in problem.message
    if problem.place.startswith("command line: "):
        return
    if problem.place == "e.yaml":  # there is nothing to point at
        assert "." not in problem.key
        return
    line = PLACE.fullmatch(problem.place)
    assert line, problem
    assert 1 <= int(line[1]) <= len(re.split(rb"\r\n|[\r\n]|\xc2\x85|\xe2\x80[\xa8\xa9]", content)), problem


def written(tree: Any, *, flow: bool = False) -> bytes:
    text: str = yaml.dump(tree, Dumper=Dumper, default_flow_style=flow, allow_unicode=True, sort_keys=False)
    return text.encode(errors="surrogatepass")


@settings(max_examples=examples(150), deadline=None, suppress_health_check=SLOW)
@given(broken_trees(), st.booleans())
def test_values_and_keys(tree: Any, flow: bool) -> None:
    outcome(written(tree, flow=flow))


@settings(max_examples=examples(400), deadline=None, suppress_health_check=SLOW)
@given(broken_bytes())
@example(b"? [a]\n: b")
@example(b"a: 0x_")
@example(b"? \n")
@example(b"a: !!float x")
@example(b"%TAG ! x\n---\na: !b c")
@example(b"a: ${" + b"${" * 300)
@example(b"{a: &x {b: *x}}")
@example(b"&x {<<: *x}")
def test_bytes(content: bytes) -> None:
    outcome(content)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=SLOW)
@given(st.lists(overrides, min_size=1, max_size=3))
@example(["train.epochs[0]=1"])
@example(["a[99999999999]=1"])
def test_overrides(given_: list[str]) -> None:
    outcome(GOOD.encode(), *given_)


LEVELS = range(1, 12)
NINE = 9
ARGUMENTS = "args: ["
LARGE: dict[str, tuple[str, str]] = {
    "aliases of aliases": (
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * NINE)}]\n" for n in LEVELS) + GOOD,
        "more than 50000 values",
    ),
    "merges of merges": (
        "a0: &a0 {a: 1}\n"
        + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * NINE)}]}}\n" for n in LEVELS)
        + GOOD,
        "more than 50000 values",
    ),
    "lists in lists": (GOOD.replace(ARGUMENTS, ARGUMENTS + "[" * 1000), "nested deeper than 40 levels"),
    "mappings in mappings": (GOOD.replace(ARGUMENTS, ARGUMENTS + "{a: " * 1000), "nested deeper than 40 levels"),
    "unknown keys": (GOOD + "".join(f"k{n}: 1\n" for n in range(1500)), "... and more problems"),
    "unknown references": (GOOD.replace(ARGUMENTS, ARGUMENTS + "'${sed}', " * 400), "... and more problems"),
    "references in references": (
        GOOD.replace("${total_steps}", "'" + "${" * 500 + "}" * 500 + "'"),
        "an incomplete ${",
    ),
    "a reference": (GOOD.replace("${total_steps}", "'${" + "a" * 200_000 + "}'"), "there is no key aaa"),
    "digits": (GOOD.replace("seed: 3", f"seed: 0x{'9' * 100_000}"), "not an integer of at most 64 bits"),
    "half a character": (GOOD.replace("seed: 3", 'seed: "\\ud83d"'), "not a string that UTF-8 can encode"),
    "a name": (GOOD.replace("name: good", f"name: {'a' * 500_000}"), "write at most 100"),
    "all of it": (GOOD + "#" * 2**20, "larger than 1 MiB"),
}


@pytest.mark.parametrize("what", LARGE)
def test_what_is_too_large_is_told_in_time(what: str) -> None:
    content, message = LARGE[what]
    error = outcome(content.encode())
    assert isinstance(error, ExperimentError)
    assert message in str(error)
    assert len(str(error).splitlines()) <= MOST_PROBLEMS + 1


@pytest.mark.parametrize("key", ["a" + ".a" * 3000, "model" + ".a" * 90, "model" + "[0]" * 3000])
def test_a_key_that_is_too_deep_is_refused(key: str) -> None:
    error = outcome(GOOD.encode(), f"{key}=1")
    assert isinstance(error, ExperimentError)
    assert "nested deeper than 40 levels" in str(error)


def test_as_deep_as_may_be() -> None:
    assert isinstance(outcome(GOOD.encode(), f"model{'.a' * 38}=1"), Experiment)
    assert isinstance(outcome(GOOD.replace(ARGUMENTS, f"{ARGUMENTS}{'{a: ' * 36}1{'}' * 36}, ").encode()), Experiment)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/urandom"])
def test_what_never_ends_is_not_read_to_its_end(path: str) -> None:
    with pytest.raises(ExperimentError, match="larger than 1 MiB"):
        load(path)


@pytest.mark.parametrize(
    "value",
    ["http://", "'http://['", "http://h:x", "'http://a b'", "http://h/é", "sqlite://", "sqlite:///", '"sqlite:///\\0"'],
)
def test_what_is_no_address_is_refused(value: str) -> None:
    error = outcome(GOOD.encode(), f"tracking.uri={value}")
    assert isinstance(error, ExperimentError)
    assert "tracking.uri: is " in str(error)


def test_a_password_in_what_is_no_address_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE", "http://me:sec ret@host:x")
    error = outcome(GOOD.encode(), "tracking.uri=${oc.env:STORE}")
    assert isinstance(error, ExperimentError)
    assert "ret" not in str(error)
