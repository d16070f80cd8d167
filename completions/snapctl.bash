# bash completion for snapctl; made by: snapctl completion bash
_snapctl() {
    local program=${COMP_WORDS[0]/#\~/$HOME} kind word
    COMPREPLY=()
    {
        read -r kind || return 0
        while IFS= read -r word; do COMPREPLY+=("$word"); done
    } < <("$program" __complete bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
    case $kind in
        files) compopt -o default ;;
        dirs) compopt -o dirnames ;;
        nospace) compopt -o nospace ;;
    esac
    compopt -o nosort 2>/dev/null
    return 0
}
if type compopt >/dev/null 2>&1; then
    complete -F _snapctl snapctl
else # bash 3 of macOS
    complete -o default -F _snapctl snapctl
fi
