# Sources /tmp/script.sh in the sandbox; programs are noted in /tmp/commands and not run. What the script decides by the
# output or the end of a program is noted in /tmp/undecided. `launch_script.py` writes what comes before: the script's
# environment, its $0 and arguments, and installed_packages.
shopt -s extglob
mapfile -t script_lines </tmp/script.sh
undecided() { printf '%s: depends on %s, which is not run; set a variable of the script\n' "$1" "$2" >>/tmp/undecided; }
command_not_found_handle() {
    if [[ "$1 ${2-}" == python*' -c' && ${3-} =~ ^import\ ([[:alnum:]_]+)$ ]]; then
        [[ " $installed_packages " == *" ${BASH_REMATCH[1]} "* ]]
        return
    fi
    printf '%s\0' "$#" "$@" >>/tmp/commands
    local place=0 line
    until [[ ${BASH_SOURCE[place + 1]-/tmp/script.sh} == /tmp/script.sh ]]; do place=$((place + 1)); done
    line=${script_lines[BASH_LINENO[place] - 1]-}
    if [[ $line =~ (^|[[:space:];])(if|elif|while|until)[[:space:]]+([^\;]*) && " ${BASH_REMATCH[3]} " == *" $1 "* ]]; then
        undecided "${line##*([[:space:]])}" "the end of $1"
    fi
    case "$1" in mkdir | touch | rm | chmod | cp | mv | ln | sleep | pkill) return 0 ;; esac
    local words=${*//$'\1'/}
    printf '\1%s\1' "${words//[[:space:]]/$'\2'}" 2>/dev/null || :
}
# Before each command: the words of a test, a case, a loop or a sum may be a mark, or hold a variable with one.
look_at() {
    PATH=/none
    case "$1" in '[ '* | '[[ '* | 'test '* | 'case '* | '(('* | 'for '*) (trap - DEBUG; look_into "$1") ;; esac  # BASH_REMATCH is the script's
}
look_into() {
    local rest=$1 name values
    while [[ $rest =~ (\$\(|\`)\ *([[:alnum:]_.-]+)|\$[\{#]*([A-Za-z_][[:alnum:]_]*)|\(\(\ *([A-Za-z_]+) ]]; do
        rest=${rest#*"${BASH_REMATCH[0]}"} name=${BASH_REMATCH[3]:-${BASH_REMATCH[4]}} values="$name[*]"
        if [[ ${BASH_REMATCH[2]} ]]; then
            [[ $(type -t "${BASH_REMATCH[2]}") ]] || undecided "${1% }" "${BASH_REMATCH[2]}"
        elif [[ $name && ${!values-} == *$'\1'*$'\1'* ]]; then
            values=${!values#*$'\1'} values=${values%%$'\1'*}
            undecided "${1% }" "${values//$'\2'/ }"
        fi
    done
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
command() { if [[ ${1-} == -[vV] ]]; then command_not_found_handle command "$@"; else "$@"; fi; }
ulimit() { :; }
mkdir() {  # of the script's own logs, into which it may write what a program prints
    command_not_found_handle mkdir "$@"
    local name
    for name; do [[ $name == -* ]] || /usr/bin/mkdir -p "$name" 2>/dev/null || :; done
}
pwd() { printf '%s\n' "$PWD"; }
cat() {
    local text
    (($# == 0)) || { command_not_found_handle cat "$@"; return; }
    IFS= read -rd '' text || printf %s "$text"
}
cd() {
    [[ ${1-} != -- ]] || shift
    case "${1-$HOME}" in
        /*) PWD=$(realpath -ms "${1-$HOME}") ;;
        *) PWD=$(realpath -ms "$PWD/$1") ;;
    esac
}
pushd() { cd "$@"; }
popd() { :; }
trap '' PIPE
trap wait EXIT
set -T
trap 'look_at "$BASH_COMMAND"' DEBUG
builtin . /tmp/script.sh "$@"
