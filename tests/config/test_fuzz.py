"""Whatever a file or a caller gives: an answer, or an error of rlstab; never anything else."""

from pathlib import Path

from hypothesis import strategies as st

import rlstab
from rlstab.config import RunConfig, dump_objective, dump_run, load_objective, load_run, objective_hash, run_hash
from rlstab.core.method_settings import settings_of
from rlstab.errors import RlstabError
from rlstab.presets import PRESETS
from rlstab.zoo import METHODS
from tests.config.strategies import PLAIN, search, searched, texts
from tests.config.test_errors import CONFLICTS, MISTAKES, UNSEEN

EXAMPLES = [path.read_text() for path in sorted((Path(rlstab.__file__).parents[1] / "examples").glob("*.yaml"))]
TEXTS = [*EXAMPLES, *(text for text, *_ in [*MISTAKES, *UNSEEN, *CONFLICTS])]

#: Names that mean something, so that random data gets past the first check.
WORDS = st.sampled_from(
    sorted(
        {"name", "preset", "set", "drop", "outer", "inner", "within", *PRESETS, *rlstab.available()}
        | {setting.name for name in rlstab.available() for setting in settings_of(METHODS.get(name))}
        | RunConfig.model_fields.keys()
        | {key for field in RunConfig.model_fields.values() for key in getattr(field.annotation, "model_fields", {})}
    )
)
SCALARS = WORDS | PLAIN | st.sampled_from([float("nan"), float("inf"), -0.0, 10**400, -1, 0, 1, 0.5, b"a", ()])
OBJECTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.integers() | st.none(), inner, max_size=4),
    max_leaves=25,
)
RUNS = st.dictionaries(st.sampled_from(sorted(RunConfig.model_fields)), OBJECTS, max_size=5)

SNIPPETS = [
    "&a ", "*a", "<<: ", "!!python/object:os.system ", "!!int ''", "!!set ", "!x ", "? ", ": ", ":", "- ", "{", "}",
    "[", "]", ",", "'", '"', "|\n", ">\n", "#", "%YAML 9.9\n", "---\n", "...\n", "~", "=", "@", "`", "\t", "\n", "\r",
    "\x00", "\x85", "\u2028", "\ufeff", "\ud800", '"\\ud800"', '"\\x00"', "1e999", ".nan", "-1", "0", "0o8", "1:99",
    "2020-99-99", "true", "\n  ", "name: ", "preset: dapo", "objective: ",
]  # fmt: skip


def answers(load, source):
    """Loads it, and what loads can be written, hashed and loaded again; or it is refused."""
    try:
        loaded = load(source)
    except RlstabError:
        return
    if load is load_objective:
        assert load_objective(dump_objective(loaded)) == loaded
        assert objective_hash(loaded)
    else:
        assert dump_run(loaded)
        assert run_hash(loaded)


@searched
def test_any_objects(examples):
    search(OBJECTS, examples, lambda data: answers(load_objective, {"objective": data}))
    search(RUNS, examples, lambda data: answers(load_run, {"objective": "s2t", **data}))
    keys = texts(9, every=examples > 99) | st.sampled_from(["a.b", "rollout.group", "objective", ""])
    overrides = st.dictionaries(keys, OBJECTS)
    search(overrides, examples, lambda data: answers(lambda run: load_run(run, data), {"objective": "s2t"}))


@st.composite
def mutated(draw):
    """A file of the examples or of the mistakes, with a few pieces cut out or put in."""
    text = draw(st.sampled_from(TEXTS))[:2000]
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(text)))
        text = text[:place] + draw(st.sampled_from(SNIPPETS)) + text[place + draw(st.integers(0, 5)) :]
    return text


@searched
def test_any_text_and_any_bytes(tmp_path, examples):
    path = tmp_path / "run.yaml"

    def written(data):
        path.write_bytes(data if isinstance(data, bytes) else data.encode(errors="surrogatepass"))
        answers(load_run, path)
        answers(load_objective, path)

    snippets = st.lists(st.sampled_from(SNIPPETS), max_size=12).map("".join)
    search(mutated() | texts(60, every=examples > 99) | snippets | st.binary(max_size=40), 2 * examples, written)
