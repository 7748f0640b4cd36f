"""Rules for the docstrings of public names: shapes, errors, sources and examples."""

import builtins
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

import partita
from partita.hmm import BaseHMM
from partita.paths.distribution import PathDistribution

MODULES = (
    "partita",
    "partita.hmm",
    "partita.nn",
    "partita.parallel",
    "partita.testing",
    "partita.integrations",
    *(f"partita.integrations.{name}" for name in partita.integrations.__all__),
)
SECTIONS = ("Args", "Fields", "Returns", "Raises", "Source", "Example")  # in this order
# Names of other projects for names of this one, which have the documentation.
ALIASES = {
    "partita.integrations.koi.Log": "partita.Log",
    "partita.integrations.koi.Max": "partita.Max",
    "partita.integrations.koi.semiring": "partita.Semiring",
    "partita.integrations.torchaudio.RNNTLoss": "partita.nn.RNNTLoss",
    "partita.integrations.torchaudio.rnnt_loss": "partita.rnnt_loss",
}
# The docstring of a constant is the string below it. Each constant has the module that defines
# it, and the name whose example shows it.
CONSTANTS = {
    "partita.Log": ("partita.primitives.semiring", "partita.logz"),
    "partita.Max": ("partita.primitives.semiring", "partita.Chain.logz"),
    "partita.testing.EDGES": ("partita.testing.inputs", "partita.testing.edge_rows"),
}
# Examples that need a package which the tests have only where a user has installed it.
NEEDS = {
    "partita.integrations.transformers.fuse": "transformers",
    "partita.integrations.transformers.fused": "transformers",
    "partita.integrations.transformers.transducer": "transformers",
    "partita.integrations.transformers.unfuse": "transformers",
    "partita.integrations.trl.patch": "trl",
}
TENSOR = re.compile(r"\b(Tensor|Lengths)\b")
SHAPE = re.compile(r"`\[[^`]*\]`|[Aa] number\b|as in `|\bas `")
NAMED_BY_CHAIN = "a semiring is not checked; what else is wrong, `Chain` names"
FOLLOWS_NOTHING = "it computes nothing that has a source"
SAID_BY_BASE = "the docstring of `BaseHMM`, its example and `fit` say it for all methods"
SUBCLASS_DEFINES = "without a body: a subclass defines it, as in the example of its class"
OF_BASE_HMM = {
    "initialize log_likelihood statistics update means_of draw": "arguments raises example",
    "score score_samples predict_proba predict filter aic bic": "arguments raises example",
    "decode forecast sample": "raises example",
    "get_stationary_distribution": "example",
}
EXCEPTIONS = {  # name and rule: why it does not hold; a test says that each is needed
    ("partita.backend", "source"): FOLLOWS_NOTHING,
    ("partita.testing.all_paths", "source"): FOLLOWS_NOTHING,
    ("partita.testing.contract_errors", "source"): "that of `ulp_error`, which measures",
    ("partita.testing.assert_within_budget", "source"): "that of `ulp_error`, which measures",
    ("partita.testing.edge_rows", "source"): FOLLOWS_NOTHING,
    ("partita.testing.forward_backward_difference", "source"): FOLLOWS_NOTHING,
    ("partita.testing.report", "source"): FOLLOWS_NOTHING,
    ("partita.testing.sample_labels", "source"): FOLLOWS_NOTHING,
    ("partita.testing.sample_rows", "source"): FOLLOWS_NOTHING,
    ("partita.testing.time_forward_backward", "source"): FOLLOWS_NOTHING,
    ("partita.testing.report", "raises"): "it prints what it is given",
    ("partita.Chain.forward_scores", "raises"): NAMED_BY_CHAIN,
    ("partita.Chain.backward_scores", "raises"): NAMED_BY_CHAIN,
    ("partita.integrations.koi.SequenceDist.ctc_loss", "example"): SUBCLASS_DEFINES,
    ("partita.integrations.koi.SequenceDist.logZ", "example"): SUBCLASS_DEFINES,
    ("partita.integrations.koi.SequenceDist.viterbi", "example"): SUBCLASS_DEFINES,
    ("partita.hmm.ConvergenceMonitor.report", "example"): "that of its class shows it",
    **{
        (f"partita.hmm.BaseHMM.{name}", rule): SAID_BY_BASE
        for names, rules in OF_BASE_HMM.items()
        for name in names.split()
        for rule in rules.split()
    },
}


class Public(NamedTuple):
    name: str
    value: Any
    kind: str


def names_of(module: ModuleType) -> list[str]:
    """`partita.nn` has no `__all__`: its own classes."""
    return getattr(
        module,
        "__all__",
        [
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ],
    )


def fields_of(value: type) -> dict[str, str]:
    if hasattr(value, "_fields") or hasattr(value, "__dataclass_fields__"):
        return {name: str(kind) for name, kind in value.__annotations__.items()}
    return {}


def kind_of(name: str, value: Any) -> str:
    if name in ALIASES:
        return "alias"
    if isinstance(value, ModuleType):
        return "module"
    if inspect.isclass(value):
        return "record" if fields_of(value) else "class"
    return "function" if inspect.isroutine(value) else "constant"


def members(name: str, value: type) -> Iterator[Public]:
    """Yield the methods of a class, and those that it has from `PathDistribution`.

    A model's own version of what `BaseHMM` documents has no docstring.
    """
    bases = [base for base in value.__mro__[:0:-1] if issubclass(base, PathDistribution)]
    shared = {member: own for base in bases for member, own in vars(base).items()}
    for member, own in {**shared, **vars(value)}.items():
        if member.startswith("_") or member in fields_of(value):
            continue
        if value is not BaseHMM and issubclass(value, BaseHMM) and hasattr(BaseHMM, member):
            continue
        if isinstance(own, classmethod):
            yield Public(f"{name}.{member}", getattr(value, member), "method")
        elif isinstance(own, property):
            yield Public(f"{name}.{member}", own, "property")
        elif inspect.isroutine(own):
            kind = "method of a module" if issubclass(value, nn.Module) else "method"
            yield Public(f"{name}.{member}", own, kind)


def found() -> Iterator[Public]:
    for path in MODULES:
        module = importlib.import_module(path)
        yield Public(path, module, "module")
        for name in names_of(module):
            value, full = getattr(module, name), f"{path}.{name}"
            if full not in MODULES:
                yield Public(full, value, kind := kind_of(full, value))
                if kind in ("class", "record"):
                    yield from members(full, value)
    # A result whose name is not exported is still read about.
    for path, name in (
        ("partita.ops.linear_heads.plan", "MemoryPlan"),
        ("partita.ops.rnnt.plan", "RNNTPlan"),
    ):
        yield Public(f"{path}.{name}", getattr(sys.modules[path], name), "record")


PUBLIC = list(found())
BY_NAME = {public.name: public for public in PUBLIC}


def doc_of(public: Public) -> str:
    if public.kind == "constant":
        return constant_doc(public.name)
    own = (
        public.value.__doc__
        if public.kind in ("module", "record", "class")
        else inspect.unwrap(getattr(public.value, "fget", public.value)).__doc__
    )
    return inspect.cleandoc(own or "")


def constant_doc(name: str) -> str:
    """The string below an assignment, as tools of documentation read it."""
    source = inspect.getsource(sys.modules[CONSTANTS[name][0]])
    below = rf'^{name.rpartition(".")[2]} = [^\n]*\n"""(.*?)"""'
    found = re.search(below, source, re.MULTILINE | re.DOTALL)
    return inspect.cleandoc(found[1]) if found else ""


def sections(doc: str) -> dict[str, str]:
    """Return the text of each section, and the text before the first under the empty name."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):", doc, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def entries(section: str) -> dict[str, str]:
    """Return the entry of each name in a section: `a, b: text`, indented by four."""
    result, current = {}, []
    for line in section.splitlines():
        if head := re.match(r"    (\w+(?:, \w+)*): (.*)", line):
            current = head[1].split(", ")
            result.update(dict.fromkeys(current, head[2]))
        elif line.startswith("     "):
            result.update({name: f"{result[name]} {line.strip()}" for name in current})
        else:
            current = []
    return result


def parameters(public: Public) -> dict[str, str]:
    found = inspect.signature(public.value).parameters.values()
    return {
        parameter.name: str(parameter.annotation) for parameter in found if parameter.name != "self"
    }


def purpose(public: Public) -> Iterator[str]:
    first, *rest = doc_of(public).splitlines() or [""]
    if not re.fullmatch(r".{10,149}[.]", first):
        yield f"expected one line of purpose that ends in a full stop, got {first!r}"
    if rest and rest[0]:
        yield "expected an empty line below the first"


def order(public: Public) -> Iterator[str]:
    heads = re.findall(r"^(\w+):(?: |$)", doc_of(public), re.MULTILINE)
    found = [name for name in heads if name in SECTIONS]
    if found != [name for name in SECTIONS if name in found]:
        yield f"expected the sections in the order {SECTIONS}, each once, got {found}"


def arguments(public: Public) -> Iterator[str]:
    """Check that each parameter has an entry, and that a tensor has its shape or a reference."""
    expected, said = parameters(public), entries(sections(doc_of(public)).get("Args", ""))
    if list(said) != [name for name in said if name in expected]:
        yield f"Args: {sorted(set(said) - set(expected))} are no parameters"
    for name, annotation in expected.items():
        text = said.get(name)
        if text is None:
            yield f"Args: expected {name}"
        elif TENSOR.search(annotation) and not SHAPE.search(text):
            yield f"Args: expected the shape of {name}, got {text!r}"


def fields(public: Public) -> Iterator[str]:
    """Check that each field has an entry, and that a tensor has a shape there or in line one."""
    head, said = (
        doc_of(public).partition("\n")[0],
        entries(sections(doc_of(public)).get("Fields", "")),
    )
    for name, annotation in fields_of(public.value).items():
        if name not in said:
            yield f"Fields: expected {name}"
        elif TENSOR.fullmatch(
            re.sub(r"ForwardRef\('(\w+)'.*", r"\1", annotation)
        ) and not SHAPE.search(said[name] + head):
            yield f"Fields: expected the shape of {name}, got {said[name]!r}"


def returns(public: Public) -> Iterator[str]:
    """Check that the result and its shape are documented; a method may do so in its first line."""
    annotation, doc = (
        str(inspect.signature(public.value).return_annotation),
        sections(doc_of(public)),
    )
    if annotation == "None" or annotation.startswith("Iterator"):
        if "Returns" in doc:
            yield "Returns: nothing is returned"
        return
    text = doc.get("Returns", "")
    if public.kind.startswith("method") and not text:
        text = doc[""].partition("\n")[0]
    if not text.strip():
        yield "expected Returns"
    elif annotation == "Tensor" and not SHAPE.search(text):
        yield f"Returns: expected the shape, got {text.strip()!r}"


def raises(public: Public) -> Iterator[str]:
    """Check that Raises names exceptions."""
    said = entries(sections(doc_of(public)).get("Raises", ""))
    if not said and parameters(public):
        yield "expected Raises"
    if unknown := [
        name for name in said if not issubclass(getattr(builtins, name, int), Exception)
    ]:
        yield f"Raises: {unknown} are no exceptions"


def source(public: Public) -> Iterator[str]:
    """Check that Source names a paper with its year, or a function."""
    if not re.search(r"\b\d{4}\b|`[\w.]+`", sections(doc_of(public)).get("Source", "")):
        yield "expected a Source with a year or a function"


def example(public: Public) -> Iterator[str]:
    if ">>> " not in sections(doc_of(public)).get("Example", ""):
        yield "expected an Example"


def shown(public: Public) -> Iterator[str]:
    """Check that the example of another name shows the constant."""
    other = CONSTANTS[public.name][1]
    if not re.search(
        rf"\b{public.name.rpartition('.')[2]}\b", sections(doc_of(BY_NAME[other]))["Example"]
    ):
        yield f"expected it in the example of {other}"


def exemplified(public: Public) -> Iterator[str]:
    """Check that a module has a name with an example."""
    inside = [
        other
        for other in PUBLIC
        if other.name.startswith(f"{public.name}.") and other.kind in ("function", "class")
    ]
    if not any(not list(example(other)) for other in inside):
        yield "expected a name with an example"


def same(public: Public) -> Iterator[str]:
    if public.value is not BY_NAME[ALIASES[public.name]].value:
        yield f"expected {ALIASES[public.name]}"


CALLABLE = (purpose, order, arguments, returns, raises, example)
RULES: dict[str, tuple[Callable[[Public], Iterator[str]], ...]] = {
    "alias": (same,),
    "class": (purpose, order, arguments, raises, source, example),
    "constant": (purpose, shown),
    "function": (*CALLABLE, source),
    "method": CALLABLE,  # its source is among those of its class
    # PyTorch calls it, or the example of its class.
    "method of a module": tuple(rule for rule in CALLABLE if rule is not example),
    "module": (purpose, exemplified),
    "property": (purpose,),
    # Its errors, source and example are those of what returns it.
    "record": (purpose, order, fields),
}


def problems(public: Public, rule: Callable[[Public], Iterator[str]]) -> list[str]:
    return [f"{rule.__name__}: {problem}" for problem in rule(public)]
