# Sources /tmp/script.sh in the sandbox; programs are noted in /tmp/commands and not run. `launch_script.py` writes what
# comes before: the script's environment, its $0 and arguments, and installed_packages.
command_not_found_handle() {
    if [[ "$1 ${2-}" == python*' -c' && ${3-} =~ ^import\ ([[:alnum:]_]+)$ ]]; then
        [[ " $installed_packages " == *" ${BASH_REMATCH[1]} "* ]]
        return
    fi
    printf '%s\0' "$#" "$@" >>/tmp/commands
    local words=${*//$'\1'/}
    printf '\1%s\1' "${words//[[:space:]]/$'\2'}" 2>/dev/null || :
}
printing() {
    case "$*" in
        *$'\1'*) command_not_found_handle "$@" ;;
        *) "/usr/bin/$@" ;;
    esac
}
for program in basename date dirname realpath seq; do eval "$program() { printing $program \"\$@\"; }"; done
for builtin in . source; do eval "$builtin() { command_not_found_handle $builtin \"\$@\"; }"; done
exec() { (($#)) || return 0; "$@"; exit; }
pwd() { printf '%s\n' "$PWD"; }
cd() {
    [[ ${1-} != -- ]] || shift
    case "${1-$HOME}" in
        /*) PWD=$(realpath -ms "${1-$HOME}") ;;
        *) PWD=$(realpath -ms "$PWD/$1") ;;
    esac
}
trap '' PIPE
trap wait EXIT
PATH=/none
exec {BASH_XTRACEFD}>/tmp/trace
set -x
builtin . /tmp/script.sh "$@"
