"""A hundred arguments that a careless shell would change, and a script that tells what came."""

TELL = "import json, os, sys\njson.dump(sys.argv[1:], open(os.environ['TOLD'], 'w'))\n"

_PLAIN = [
    "", " ", "  two  spaces  ", "\t", "\n", "a\nb", "\n\n", "\r\n", "\v\f", "tab\there",
    "'", '"', "''", '""', "it's", 'say "so"', "'\"'\"'", "\\", "\\\\", "\\n", "a\\", "\\'", '\\"',
    "`", "`id`", "$", "$HOME", "${HOME}", "$(id)", "$((1+1))", "$$", "$?", "$!", "$@", "$*", "$1",
    "!", "!!", "!-1", "#", "# no comment", "a #b", ";", "; id", "&", "& id", "&&", "|", "| cat",
    "||", "<", ">", ">/dev/null", "<<EOF", "2>&1", "<(id)", "(", ")", "()", "(id)", "{", "}",
    "{a,b}", "{1..3}", "[", "]", "[a-z]", "*", "*.py", "?", "**", "~", "~root", "~+", "%", "%j",
    "%%", "%s", "^", "=", "==", "a=b", "A=b", "--", "-", "-x", "--flag", "--flag=a b", "-n1", "@",
    "@file", ":", "\x01", "\x1b[31m", "\x7f", "é", "ü" * 50, "日本語", "🙂", "\u202e", "\u00a0",
    "a\u0301", "EOF", "#SBATCH --nodes=99", "\n#SBATCH --nodes=99\n", "x" * 4000, "{seed}",
]  # fmt: skip

NASTY = [*_PLAIN, "\udcff", "odd\udc80byte"]
assert len(NASTY) >= 100
