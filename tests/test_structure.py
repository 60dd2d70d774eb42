"""The house rules that can be checked in the source."""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import io
import json
import re
import tokenize
from pathlib import Path

from liger_hw import env
from liger_hw.backends import VENDORS

PACKAGE = Path(__file__).resolve().parent.parent / "liger_hw"
SOURCES = sorted(PACKAGE.rglob("*.py"))
KERNELS = sorted([*(PACKAGE / "kernels").rglob("*.py"), *(PACKAGE / "runtime").glob("*.py")])
MOST_LINES = 700

VENDOR_WORD = re.compile(
    r"nvidia|\bamd|amd\b|\bintel|intel\b|cuda|rocm|\bhip|\bxpu|\bgfx\d|\bsm_?\d\d|\bpvc\b|\bbmg\b|hopper|blackwell|ampere"
    r"|cdna|rdna|tesla|geforce|radeon|instinct|\bh[12]00\b|\ba100\b|\bmi\d{3}",
    re.IGNORECASE,
)
# Lines of code in kernels/ and runtime/ that may name something of a vendor, with the reason.
VENDOR_CODE = {
    "operator.py": ['for key in ("CUDA", "XPU"):'],  # torch's dispatch keys; ROCm shares the first
    "triton_import.py": [
        "pip install 'liger_hw[cuda]', 'liger_hw[rocm]' or 'liger_hw[xpu]'"
    ],  # the extras' names, in an error
    "dependent_launch.py": ["tl.extra.cuda.gdc"],  # Triton's names; nothing is emitted for others
}
SYNCS = re.compile(
    r"\.item\(\)|torch\.equal\(|\.nonzero\(|torch\.nonzero|\.tolist\(\)|\.cpu\(\)|synchronize\(|masked_select\("
    r"|torch\.(as_)?tensor\(.*device="  # a copy from the host
)
# What runs in a training step besides kernels/.
IN_A_STEP = sorted(
    [
        *(PACKAGE / "chunked_loss").glob("*.py"),
        *(PACKAGE / "recompute").glob("*.py"),
        *(PACKAGE / "transformers" / "probing").glob("*.py"),
    ]
    + [PACKAGE / "transformers" / f"{name}.py" for name in ("deferred", "grpo_loss", "loss", "engine")]
)
WAITS = [
    "self._arrived.synchronize()",  # heads/linear_head.py: for a number on its way since the forward
]


@functools.cache
def _code(path: Path) -> list[tuple[int, str]]:
    """(line number, text) of a file without comments and docstrings."""
    text = path.read_text()
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    hidden: set[int] = set()
    for node in ast.walk(tree):
        bodies = [node.body] if isinstance(node, documented) else []
        for body in bodies:
            for statement in body:  # also the strings that document an assignment above them
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    if isinstance(statement.value.value, str):
                        hidden |= set(range(statement.lineno, statement.end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return [(n, re.sub(r"(^|\s)#.*", "", line)) for n, line in lines if n not in hidden]


def _found(paths, pattern) -> list[str]:
    return [
        f"{p.relative_to(PACKAGE.parent)}:{n}: {line.strip()}"
        for p in paths
        for n, line in _code(p)
        if pattern.search(line)
    ]


def test_no_vendor_in_kernels():
    wrong = []
    for path in KERNELS:
        allowed = VENDOR_CODE.get(path.name, [])
        found = _found([path], VENDOR_WORD)
        wrong += [line for line in found if not any(text in line for text in allowed)]
    assert not wrong, "\n".join(wrong)


def test_allowed_vendor_lines_are_still_there():
    for name, texts in VENDOR_CODE.items():
        code = "\n".join(line for _, line in _code(PACKAGE / "runtime" / name))
        assert all(text in code for text in texts), f"{name}: drop what is gone from VENDOR_CODE"


def test_no_launch_numbers_in_kernels():
    """A kernel is launched with the configuration that the registry resolved."""
    wrong = _found(KERNELS, re.compile(r"\bnum_(warps|stages|ctas)\s*=\s*\d"))
    assert not wrong, "\n".join(wrong)


def test_no_autotuner_anywhere():
    wrong = _found(SOURCES, re.compile(r"@triton\.(autotune|heuristics)|triton\.autotune\(|triton\.heuristics\("))
    assert not wrong, "\n".join(wrong)


def test_no_host_synchronisation_in_a_step():
    """Only WAITS, and checking modes that the user has switched on, may wait for the device."""
    found = [line for line in _found([*KERNELS, *IN_A_STEP], SYNCS) if not _checks(line)]
    wrong = [line for line in found if not any(line.endswith(text) for text in WAITS)]
    assert not wrong, "\n".join(wrong)
    assert len(found) == len(WAITS), "drop what is gone from WAITS"


def _checks(found: str) -> bool:
    """Whether the line is in a function whose name starts with `check` or `_check`."""
    file, number = found.split(":")[:2]
    tree = ast.parse((PACKAGE.parent / file).read_text())
    inside = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.lineno <= int(number) <= f.end_lineno]
    return any(f.name.lstrip("_").startswith("check") for f in inside)


def test_no_threads_in_a_step():
    starts = re.compile(r"ThreadPool|ProcessPool|threading\.(Thread|Timer)\b|_thread\.start|multiprocessing|\bfork\(")
    rooms = ("autotune", "cli", "bench")
    wrong = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in SOURCES
        if path.relative_to(PACKAGE).parts[0] not in rooms
        for number, line in _code(path)
        if starts.search(line)
    ]
    assert not wrong, "nothing but the tuner and compile_ahead starts a thread:\n" + "\n".join(wrong)


def test_what_bears_a_name_of_liger_s_checks_its_arguments():
    """An autograd Function does not check: code written for Liger gets the classes of compat/functions.py, and base
    classes of losses, which check in their forward."""
    bases = "Function", "OperatorFunction", "torch.autograd.Function"
    sources = [path for path in SOURCES if path.name != "loss_bases.py"]
    found = [
        node for path in sources for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    functions = [node.name for node in found if any(ast.unparse(base) in bases for base in node.bases)]
    assert len(functions) > 30 and not [name for name in functions if name.startswith("Liger")]


def test_variables_live_in_one_file():
    wrong = []
    for path in SOURCES:
        if path.name == "env.py":
            continue
        reads = re.compile(r"(environ(\.get\(|\[)|getenv\()f?[\"']LIGER_HW_")
        wrong += _found([path], reads)
        for name in re.findall(r"LIGER_HW_[A-Z_]+", "\n".join(line for _, line in _code(path))):
            if not name.startswith(env.CONFIG_PREFIX) and name != env.PREFIX and name not in env.VARIABLES:
                wrong.append(f"{path.name}: {name} is not in env.py")
    assert not wrong, "\n".join(wrong)


def test_every_op_is_complete(op):
    assert op.function.__name__ == f"liger_{op.name}", "the public function is liger_<op>"
    assert op.reference.__name__ == f"{op.name}_reference"
    assert op.workloads and op.tunables and op.options and op.options[0] == {}
    assert (op.function.__doc__ or "").strip()
    dims = op.tunables[0].dims
    assert all(t.dims == dims and t.op == op.name for t in op.tunables)
    assert len({t.variant for t in op.tunables}) == len(op.tunables)
    for sizes in (*op.workloads.values(), *op.small):
        assert len(sizes) == len(dims) and all(type(n) is int and n > 0 for n in sizes)
    for tunable in op.tunables:
        launched = getattr(tunable.kernels[0], "fn", tunable.kernels[0]).__name__
        assert re.fullmatch(r"_\w+_kernel", launched), f"{tunable.name}: {launched} should be _<op>_<variant>_kernel"


# Sizes of a model, not of a batch: a kernel may be specialised on their divisibility.
MODEL_SIZES = set("n_cols n_channels n_experts n_heads n_inner n_k_heads n_q_heads n_p n_q n_stored".split())
MODEL_SIZES |= {"n_in", "n_mix", "n_out", "n_streams"}
SPECIALISED = {
    ("_scale_kernel", "n_elements"),  # its flag TAIL says whether 16 divides it, which is what is specialised
    *((f"_embedding_{what}_kernel", "n_rows") for what in ("fwd", "unsorted", "bwd", "join")),  # of the vocabulary
    *((f"_{how}_softmax_{way}_kernel", "n_keys") for how in ("causal", "channels") for way in ("fwd", "bwd")),
    *((f"_{how}_fill_kernel", "n_keys") for how in ("causal", "channels")),  # columns of a row, accessed widely
}


def test_a_new_batch_size_compiles_nothing(op):
    """A count among a kernel's arguments is in `do_not_specialize`, unless it is a size of the model."""
    for kernel in {id(k): k for tunable in op.tunables for k in tunable.kernels}.values():
        name = getattr(kernel, "fn", kernel).__name__
        counts = {p.name for p in getattr(kernel, "params", ()) if _is_specialised(p)} - MODEL_SIZES
        wrong = {count for count in counts if (name, count) not in SPECIALISED}
        assert not wrong, f"{name}: put {sorted(wrong)} into do_not_specialize, or into MODEL_SIZES"


def _is_specialised(parameter) -> bool:
    return parameter.name.startswith("n_") and not parameter.is_constexpr and not parameter.do_not_specialize


def test_files_stay_readable():
    long = {
        str(p.relative_to(PACKAGE.parent)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > MOST_LINES
    }
    assert not long, f"more than {MOST_LINES} lines, split by meaning: {long}"


MOST_PARAMETERS, MOST_KERNEL_LINES = 25, 150
MORE_PARAMETERS = {"_modulated_rms_norm_bwd_kernel": 28}
"""Kernels with more parameters, and how many."""


def test_a_person_can_read_a_kernel():
    parameters = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                parameters[node.name] = len(node.args.args) + len(node.args.kwonlyargs)
                lines = node.end_lineno - node.lineno + 1
                assert lines <= MOST_KERNEL_LINES, f"{path}: {node.name} has {lines} lines, at most {MOST_KERNEL_LINES}"
    more = {name: n for name, n in parameters.items() if n > MORE_PARAMETERS.get(name, MOST_PARAMETERS)}
    assert not more, f"more than {MOST_PARAMETERS} parameters, split by meaning: {more}"


CEILING = (
    48_414,
    "what the package had on 2026-11-27, long sequences (820), and training in FP8 (1900), attention residuals "
    "and neighbourhood attention (1030), estimates and prebuilt folders (420); recorded calls won more than "
    "they cost (290), hyper-connections (1180), names of 0.8.5 and missing packages (110), logits "
    "watched and read in inference mode (50), inputs of the gated delta rule and LFM2's convolution (930) and "
    "their patch (210), weights whose class overrides F.linear or that are frozen since (13), "
    "checkpoints of weights kept in FP8 (40), DoRA around them and merges refused (40), "
    "quantised and sharded weights (14), "
    "Liger's ORPO trainer (101), ZeRO (33), "
    "kernels of fused_moe's first call compiled in parallel (20), its gradients of few rows' weights "
    "several tiles a program (62), norms between powers of two (6), what an "
    "estimate finds too large (18), layers with experts in plans, and the refusal of layers that they do not know "
    "(106), fake tensors without torch's compiler (76), which one scan of logits paid for, "
    "a backward after an interrupted one (11), shards of gathered layers (5), "
    "weights kept in FP8 that are read in their dtype (40), gradients with respect to logits refused (8), packing in "
    "a report (19)",
)
"""Lines of the package, and why they are that many. It is raised only with what was added, and what that is worth."""


def test_the_package_does_not_grow():
    lines, (most, _) = sum(len(path.read_text().splitlines()) for path in SOURCES), CEILING
    assert lines <= most, f"{lines} lines, at most {most}: take something out, or raise CEILING and say why"


VAGUE = "found own given made held wanted asked said told heard met".split()
"""Identifiers that name no thing: call a result `config`, `match`, `entry`, `tensor`, `args`."""
IDIOM = re.compile(
    r"\b(nobody|somebody|what is no|of those that|that of|those of|so many|as it is said|is none|none of them)\b", re.I
)
"""Turns of speech, in comments and strings, that a reader has to read twice."""
WORDS_LEFT = Path(__file__).with_name("words_left.json")
"""File -> how many of both it has; may only shrink. `python tests/test_structure.py` writes it."""


def _words(path: Path) -> int:
    names, prose = collections.Counter(), 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            names[token.string] += 1
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            prose += len(IDIOM.findall(token.string))
    return prose + sum(names[word] for word in VAGUE)


def _words_by_file() -> dict[str, int]:
    return {str(path.relative_to(PACKAGE)): count for path in SOURCES if (count := _words(path))}


def test_plain_words():
    left = json.loads(WORDS_LEFT.read_text())
    wrong = [
        f"{file}: {count}, at most {left.get(file, 0)}"
        for file, count in _words_by_file().items()
        if count > left.get(file, 0)
    ]
    assert not wrong, f"words of VAGUE and IDIOM that were not there before: {wrong}"


PRIVATE = re.compile(r"torch\._C|torch\._(?!_version)|\b_C\.|sys\.settrace|__code__|getrefcount|\bdis\.|_load_module")
"""Interfaces of torch, Triton and Python that are not public."""


def test_private_interfaces_stand_in_one_list():
    """private.py has torch's, each with its reason; `private.ELSEWHERE` lists other uses."""
    from liger_hw import private

    explained = set(re.findall(r"^(\w+) = .*  # .+", (PACKAGE / "private.py").read_text(), re.MULTILINE))
    explained |= {"hooks_on_every_module", "ELSEWHERE"}  # by strings below them
    documented = {name for name, value in vars(private).items() if inspect.isfunction(value) and value.__doc__}
    assert not {name for name in vars(private) if name[0] != "_"} - {"annotations", "torch"} - explained - documented
    files = {
        str(p.relative_to(PACKAGE)): len(PRIVATE.findall(p.read_text())) for p in SOURCES if p.name != "private.py"
    }
    counts = {file: count for file, count in files.items() if count}
    wrong = {file: count for file, count in counts.items() if count > private.ELSEWHERE.get(file, (0, ""))[0]}
    assert not wrong, f"take these from liger_hw/private.py: {wrong}"
    assert not private.ELSEWHERE.keys() - counts.keys(), "no longer there: take it out of private.ELSEWHERE"


def test_one_folder_a_vendor():
    folders = {p.parent.name for p in (PACKAGE / "backends").glob("*/__init__.py")}
    assert folders == set(VENDORS)
    others = [p for p in SOURCES if "backends" not in p.parts and "kernels" not in p.parts]
    wrong = _found([p for p in others if p.name == "registry.py"], VENDOR_WORD)
    assert not [line for line in wrong if 'for name in ("cuda", "xpu")' not in line], wrong


# Files that still take underscore names from other modules. It may only shrink.
UNDERSCORES_LEFT = {"transformers/auto_model.py"}  # names that frameworks look for


def _underscores() -> dict[str, list[str]]:
    """File -> underscore names that it takes from other files of the package."""
    files = {p.relative_to(PACKAGE.parent).as_posix(): p for p in SOURCES}
    modules = {name[:-3].replace("/", ".").removesuffix(".__init__"): name for name in files}
    taken = collections.defaultdict(list)
    for name, path in files.items():
        module = name[:-3].replace("/", ".")
        package = module.rpartition(".")[0].split(".")
        known: dict[str, str] = {}  # local name -> module
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            base = base if node.level else node.module
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                home = modules.get(whole) or modules.get(base)
                if home is None or home == name:
                    continue
                if whole in modules:
                    known[alias.asname or alias.name] = whole
                elif alias.name.startswith("_") and not alias.name.startswith("__"):
                    beside = home.rpartition("/")[0] == name.rpartition("/")[0]
                    if not (beside and alias.name.endswith("_kernel")):  # an op's kernels may have a file beside it
                        taken[name].append(alias.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
                hidden = node.attr.startswith("_") and not node.attr.startswith("__")
                if hidden and f"{known[node.value.id]}.{node.attr}" not in modules:
                    taken[name].append(f"{node.value.id}.{node.attr}")
    return taken


def test_underscore_names_stay_in_their_module():
    wrong = {n: names for n, names in _underscores().items() if n.removeprefix("liger_hw/") not in UNDERSCORES_LEFT}
    assert not wrong, f"make these names public, or move what uses them: {wrong}"


def test_no_import_circles():
    """Imports inside functions, for type checkers and of modules named in strings count too."""
    imported = collections.defaultdict(set)
    for name, file, _ in _arrows():
        if "*" not in file and name != file:
            imported[name].add(file)

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            new = imported[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    reaches = {name: reached(name) for name in list(imported)}
    circles = {frozenset(o for o in files if n in reaches.get(o, ())) for n, files in reaches.items() if n in files}
    assert not circles, f"what is below may not import what is above it: {[sorted(circle) for circle in circles]}"


FLOORS = (
    "__init__ private text locks files lazy runtime/__init__ runtime/sharding autotune/__init__",
    "kernels/__init__ env",  # the names of the ops, of each of which a variable is made
    "backends",
    "ops",
    "autotune/tables autotune/store autotune/lock",  # what the registry answers from
    "registry",
    "recompute/levels recompute/recipes",  # what an op says about its output; the settings a user may give
    "runtime",
    "kernels",
    "autotune",
    "chunked_loss",
    "distributed",
    # what a patch consists of, and how a module is recognised
    "transformers/marks transformers/choice transformers/report transformers/replacing "
    "transformers/functional transformers/source transformers/probing",
    "recompute",
    "transformers",
    "megatron hub trl",
    "compat",
    "bench",
    "cli",
    "__main__",
)
"""The rooms, the lowest first. A file may be listed apart from its room. A module imports from its floor or below."""
UPWARDS = {
    ("__init__", "*"): "the table of public names; each is loaded when it is asked for",
    ("ops", "kernels/*"): "the file of an op, when somebody asks for the op",
    ("ops", "runtime/triton_import"): "whether this process interprets kernels; asked when an op runs",
    ("transformers/__init__", "compat/modules"): "Liger's layers that only the shim has",
    ("transformers/__init__", "compat/replaced"): "what to use in the place of a name of Liger's that is not here",
}
"""Imports from a higher floor, inside functions or of modules named in strings, and why; may only shrink."""


def _floor_of(file: str) -> int:
    """The floor of a file, named without suffix, by the longest entry that contains it."""
    floors = {entry: floor for floor, entries in enumerate(FLOORS) for entry in entries.split()}
    return floors[max((entry for entry in floors if f"{file}/".startswith(f"{entry}/")), key=len)]


@functools.cache
def _arrows() -> list[tuple[str, str, str]]:
    """(file, file that it imports, when), without suffixes. when: `now`, `later` (inside a function or by a string that
    names a module) or `typing` (only for type checkers). `room/*` is any file of a room."""
    files = {p.relative_to(PACKAGE).as_posix().removesuffix(".py"): p for p in SOURCES}
    modules = {f"liger_hw.{name}".replace("/", ".").removesuffix(".__init__"): name for name in files}
    root = {"liger_hw": modules.pop("liger_hw")}
    found = []

    def look(name: str, node: ast.AST, when: str) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            when = "typing"
        homes: set[str | None] = set()
        package = ["liger_hw", *name.split("/")[:-1]]
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            homes = {modules.get(f"{base}.{alias.name}") or (modules | root).get(base) for alias in node.names}
        elif isinstance(node, ast.Import):
            homes = {modules.get(alias.name) for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            homes, when = {modules.get(node.value)}, "later"
        elif isinstance(node, ast.JoinedStr) and _variable(node.values[0]) == "__package__":
            whole = ".".join(package) + getattr(node.values[1], "value", "")
            room = modules.get(whole.removesuffix("."), "").removesuffix("/__init__")
            homes, when = {modules.get(whole) if len(node.values) == 2 else f"{room}/*"}, "later"
        found.extend((name, home, when) for home in homes if home)
        for child in ast.iter_child_nodes(node):
            look(name, child, "later" if when == "now" and isinstance(node, (ast.FunctionDef, ast.Lambda)) else when)

    for name, path in files.items():
        look(name, ast.parse(path.read_text()), "now")
    return found


def _variable(node: ast.AST) -> str:
    """The name of the variable in a part of an f-string, or ""."""
    return getattr(getattr(node, "value", None), "id", "")


def test_imports_go_down():
    climbing = [a for a in _arrows() if _floor_of(a[1]) > _floor_of(a[0]) and a[2] != "typing"]
    found = {pair for a, b, _ in climbing for pair in ((a, b), (a, "*")) if pair in UPWARDS}
    wrong = {f"{a} -> {b}" for a, b, _ in climbing if not {(a, b), (a, "*")} & found}
    assert not wrong, f"these import what is above them (FLOORS): {sorted(wrong)}"
    eager = {f"{a} -> {b}" for a, b, when in climbing if when == "now"}
    assert not eager, f"these may be imported inside a function alone: {sorted(eager)}"
    assert found == UPWARDS.keys(), f"drop what is gone from UPWARDS: {UPWARDS.keys() - found}"


def test_every_floor_is_there():
    files = [p.relative_to(PACKAGE).as_posix().removesuffix(".py") for p in SOURCES]
    entries = [entry for entries in FLOORS for entry in entries.split()]
    gone = [entry for entry in entries if not any(f"{file}/".startswith(f"{entry}/") for file in files)]
    assert not gone, f"drop what is gone from FLOORS: {gone}"


def test_every_op_file_registers_its_op():
    from liger_hw import registry
    from liger_hw.kernels import EXPORTS

    unregistered = {
        "quantize_float8",  # float8_linear's first step, without a gradient
        "mm_int8int2",  # an integer product that has no gradient: nothing of what the shared tests check
        "fused_linear_cross_entropy_tp",  # several ranks around an op that is registered
        "fused_linear_scaled_cross_entropy",  # another name for one that is
    }
    assert set(registry.ops()) == {module.rpartition(".")[2] for module in EXPORTS} - unregistered


if __name__ == "__main__":
    WORDS_LEFT.write_text(json.dumps(_words_by_file(), indent=1) + "\n")
