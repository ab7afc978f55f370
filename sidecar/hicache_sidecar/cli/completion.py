"""Completion scripts for bash, zsh and fish, made from the table of commands."""

from hicache_sidecar.cli.arguments import MODES, PREFETCH_POLICIES, WRITE_POLICIES, parse, parser
from hicache_sidecar.cli.commands import COMMANDS
from hicache_sidecar.cli.context import EXIT_DONE, Context

BACKENDS = ("file", "nixl", "mooncake", "hf3fs", "aibrix", "eic", "redis", "dynamic")
SHELLS = ("bash", "zsh", "fish")
_POSITIONAL = {
    "attach": BACKENDS,
    "swap": BACKENDS,
    "check": BACKENDS,
    "backends": BACKENDS,
    "bypass": ("on", "off"),
    "resolve": ("adopt", "reapply"),
    "completion": SHELLS,
    "failover": ("show", "set", "unset", "release"),
}
_VALUES = {
    "--mode": MODES,
    "--reconnect": ("on", "off"),
    "--watch": ("reads", "reads_and_writes"),
    "--prefetch-policy": PREFETCH_POLICIES,
    "--write-policy": WRITE_POLICIES,
    "-o": ("table", "json"),
}
_CHANGE = "--mode --wait --timeout --if-revision --request-id --reason"
_KNOBS = (
    "--prefetch-threshold --prefetch-timeout-base --prefetch-timeout-per-ki-token --prefetch-timeout-max "
    "--hicache-storage-pass-prefix-keys"
)
_ATTACH = f"--config --prefetch-policy --write-policy {_CHANGE}"
_OPTIONS = {
    "status": "--fresh",
    "idle": "--all",
    "attach": f"{_ATTACH} --force",
    "swap": f"{_ATTACH} --force --checkpoint",
    "check": _ATTACH,
    "detach": f"{_CHANGE} --checkpoint",
    "policy": f"--prefetch-policy --write-policy {_KNOBS} {_CHANGE}",
    "rollback": _CHANGE,
    "clear": "--confirm --timeout",
    "resolve": "--reason --timeout",
    "drain": "--timeout --hold --reason",
    "watch": "--after --count",
    "failover": "--spare --reconnect --mode --watch --confirm --min-stay --steady --backoff --backoff-max "
    "--flap-window --wait --timeout --flap-limit --policies --reason",
    "bundle": "--unit",
    "demo": "--keep",
}


def run_completion(context: Context, arguments: list[str]) -> int:
    """Print the script; ``source <(hicachectl completion bash)``."""
    made = parser("completion", "Completion script, to be sourced by the shell.")
    made.add_argument("shell", choices=SHELLS)
    options = parse(context, made, arguments)
    text = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell]()
    if context.json:
        context.document({"shell": options.shell, "script": text})
    else:
        context.line(text.rstrip("\n"))
    return EXIT_DONE


def _bash() -> str:
    commands = " ".join(COMMANDS)
    lines = [
        "_hicachectl() {",
        '  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" word command="" words=""',
        '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        f'    case " {commands} " in *" $word "*) command="$word"; break;; esac',
        "  done",
        '  case "$previous" in',
    ]
    lines += [
        f'    {option}) COMPREPLY=($(compgen -W "{" ".join(values)}" -- "$current")); return;;'
        for option, values in _VALUES.items()
    ]
    lines += [
        '    --socket) COMPREPLY=($(compgen -f -- "$current")); return;;',
        "  esac",
        '  case "$command" in',
        f'    "") words="{commands} --socket -o -q --help --version";;',
    ]
    for name in COMMANDS:
        words = f"{' '.join(_POSITIONAL.get(name, ()))} {_OPTIONS.get(name, '')} --help".split()
        lines.append(f'    {name}) words="{" ".join(words)}";;')
    lines += ["  esac", '  COMPREPLY=($(compgen -W "$words" -- "$current"))', "}", "complete -F _hicachectl hicachectl"]
    return "\n".join(lines) + "\n"


def _zsh() -> str:
    # bashcompinit runs the bash function as it is: one script to keep right.
    return "#compdef hicachectl\nautoload -U +X bashcompinit && bashcompinit\n" + _bash()


def _fish() -> str:
    lines = ["complete -c hicachectl -f"]
    for name, command in COMMANDS.items():
        lines.append(f"complete -c hicachectl -n __fish_use_subcommand -a {name} -d {_quoted(command.summary)}")
        here = f"-n '__fish_seen_subcommand_from {name}'"
        if name in _POSITIONAL:
            lines.append(f"complete -c hicachectl {here} -a {_quoted(' '.join(_POSITIONAL[name]))}")
        for option in _OPTIONS.get(name, "").split():
            values = f" -x -a {_quoted(' '.join(_VALUES[option]))}" if option in _VALUES else ""
            lines.append(f"complete -c hicachectl {here} -l {option[2:]}{values}")
    lines += [
        "complete -c hicachectl -n __fish_use_subcommand -l socket -r -F",
        "complete -c hicachectl -s o -x -a 'table json'",
        "complete -c hicachectl -s q",
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
