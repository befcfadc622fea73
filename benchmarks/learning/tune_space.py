"""What ./run.sh tune searches: a script's settings and the values that they may take, checked against the script.

learning_rate=loguniform(1e-4,1e-2)   also uniform(a,b), quniform(a,b,step), randint(a,b); both ends are included
gamma=[0.98,0.99,0.995]               one of these
learning_rate=*1.2                    --perturb only: multiplied or divided by 1.2
"""

import ast
import math
import types
from dataclasses import Field, dataclass
from typing import Literal, NoReturn, Union, get_args, get_origin

from benchmarks.common.programs import SCRIPTS, did_you_mean, fail, fields_of, load_script

NUMBERS = {"uniform": 2, "loguniform": 2, "quniform": 3, "randint": 2}  # numbers that each kind of range takes
FORMS = "uniform(a,b), loguniform(a,b), quniform(a,b,step), randint(a,b) or a list [a,b,...]"
OWN = (
    "exp_name", "seed", "run_dir", "resume", "override", "checkpoint_every", "tensorboard", "track",
    "wandb_project_name", "wandb_entity", "env_id", "total_timesteps",
)  # fmt: skip  # settings that name a run or its log, that tune sets itself, or that make it another task


@dataclass(frozen=True)
class Space:
    """The values of one setting. `numbers` holds the ends of a range and its step, the list's values, or the factor."""

    name: str
    kind: Literal["uniform", "loguniform", "quniform", "randint", "list", "factor"]
    numbers: tuple
    limits: tuple[float, float] = (-math.inf, math.inf)  # of the script

    @property
    def is_range(self) -> bool:
        return self.kind in NUMBERS

    def domain(self):
        """What Ray Tune draws from."""
        from ray import tune

        if self.kind == "list":
            return tune.choice(list(self.numbers))
        if self.kind == "randint":
            return tune.randint(self.numbers[0], self.numbers[1] + 1)
        return getattr(tune, self.kind)(*self.numbers)

    def distribution(self):
        """The same for Optuna."""
        from optuna import distributions

        if self.kind == "list":
            return distributions.CategoricalDistribution(self.numbers)
        if self.kind == "randint":
            return distributions.IntDistribution(*self.numbers)
        low, high, *step = self.numbers
        return distributions.FloatDistribution(low, high, log=self.kind == "loguniform", step=step[0] if step else None)

    def within(self, value):
        """A perturbed value, clamped to the range and to the script's limits."""
        low, high = self.limits
        if self.is_range:
            low, high = max(low, self.numbers[0]), min(high, self.numbers[1])
        return type(value)(min(max(value, low), high))


def plain(value):
    """A NumPy number, as Ray Tune draws them, converted to a Python one."""
    return value.item() if hasattr(value, "item") else value


def as_flag(name: str, value) -> str:
    """A setting as it is typed."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={plain(value)}"


def show(settings: dict) -> str:
    """Settings in a few words."""
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in settings.items()
    )


def kinds_of(field: Field) -> tuple:
    """The types that a setting may have."""
    return get_args(field.type) if get_origin(field.type) in (Union, types.UnionType) else (field.type,)


def accepts(field: Field, value) -> bool:
    """Whether a setting can have this value, as far as its type says."""
    for kind in kinds_of(field):
        if get_origin(kind) is Literal:
            fits = value in get_args(kind)
        elif kind is float:
            fits = type(value) in (int, float) and math.isfinite(value)
        else:
            fits = type(value) is kind
        if fits:
            return True
    return False


def type_name(field: Field) -> str:
    return " or ".join(getattr(kind, "__name__", str(kind).replace("typing.", "")) for kind in kinds_of(field))


def check_name(flag: str, name: str, known: dict[str, Field], script: str) -> None:
    """Refuse a name that is no setting of the script, or one that is not to be searched."""
    if name in OWN:
        fail(f"{flag} {name}: it names runs or their logs, tune sets it itself, or it would be another task")
    if name not in known:
        hint = did_you_mean(name, [x for x in known if x not in OWN])
        fail(f"{flag} {name}: {script} has no such setting{hint}")


def parsed(text: str, with_factor: bool) -> tuple[str, tuple]:
    """(kind, numbers) of what stands behind the name; ValueError says what is wrong."""
    if with_factor and text.startswith("*"):
        factor = float(text[1:])
        if not 1 < factor < math.inf:
            raise ValueError("the factor must be more than 1")
        return "factor", (factor,)
    node = ast.parse(text, mode="eval").body
    if isinstance(node, ast.List):
        values = tuple(map(ast.literal_eval, node.elts))
        if len(set(values)) < 2:
            raise ValueError("a list needs two different values or more")
        return "list", values
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NUMBERS):
        raise ValueError("not known")
    kind, numbers = node.func.id, tuple(map(ast.literal_eval, node.args))
    if node.keywords or len(numbers) != NUMBERS[kind] or any(type(x) not in (int, float) for x in numbers):
        raise ValueError(f"{kind} takes {NUMBERS[kind]} numbers")
    return kind, numbers


def check_range(kind: str, numbers: tuple) -> None:
    """ValueError if nothing can be drawn from a range."""
    low, high, *step = numbers
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"the range from {low} to {high} is empty")
    if kind == "loguniform" and low <= 0:
        raise ValueError("a logarithmic range must begin above 0")
    if kind == "randint" and any(type(x) is not int for x in numbers):
        raise ValueError("randint takes whole numbers")
    if step and not 0 < step[0] <= high - low:
        raise ValueError(f"the step must be more than 0 and at most {high - low:g}")
    if step and any(not math.isclose(x / step[0], round(x / step[0]), abs_tol=1e-9) for x in (low, high)):
        raise ValueError(f"{low} and {high} must be multiples of the step {step[0]}")


def limits_of(script: str, field: Field, values: tuple) -> tuple[float, float]:
    """The smallest and largest value of a setting that the script accepts."""
    numbers = [x for x in values if type(x) in (int, float)]
    if not numbers:
        return -math.inf, math.inf
    limits = load_script(SCRIPTS / f"{script}.py").LIMITS
    return limits.get(field.name, (int(int in kinds_of(field)), math.inf))


def parse(flag: str, text: str, script: str) -> Space:
    """The space that NAME=VALUES describes; SystemExit(2) if it is invalid, or not one of the script's settings."""
    name, equals, values = (x.strip() for x in text.partition("="))
    known = fields_of(script)
    check_name(flag, name, known, script)
    field = known[name]

    def refuse(why: object) -> NoReturn:
        factor = ", or a factor *a" * (flag == "--perturb")
        fail(f"{flag} {text}: {why}; {name} is {type_name(field)}, its values are {FORMS}{factor}")

    if not equals:
        refuse("there is no =")
    try:
        kind, numbers = parsed(values, flag == "--perturb")
        if kind in NUMBERS:
            check_range(kind, numbers)
    except (ValueError, SyntaxError, TypeError) as error:
        refuse(getattr(error, "msg", None) or error)
    examples = (field.default,) if kind == "factor" else numbers
    if kind == "factor" and type(field.default) not in (int, float):
        refuse(f"its default, {field.default}, can't be multiplied")
    if kind in NUMBERS and kind != "randint" and float not in kinds_of(field):
        refuse(f"{kind} draws fractions")
    wrong = [x for x in examples if not accepts(field, x)]
    if wrong:
        refuse(f"{wrong[0]!r} has the wrong type")
    limits = limits_of(script, field, examples)
    outside = [x for x in examples[:2] if kind in NUMBERS] or [x for x in examples if type(x) in (int, float)]
    for x in outside:
        if not limits[0] <= x <= limits[1]:
            refuse(f"{x} is not between {limits[0]} and {limits[1]}")
    return Space(name, kind, numbers, limits)


def parse_all(flag: str, texts: tuple[str, ...], script: str) -> dict[str, Space]:
    """The spaces of a flag, by name, none twice."""
    spaces = {}
    for text in texts:
        space = parse(flag, text, script)
        if space.name in spaces:
            fail(f"{flag} {text}: {space.name} is there twice")
        spaces[space.name] = space
    return spaces
