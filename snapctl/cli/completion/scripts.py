"""The scripts that ask snapctl what could be typed next. They run the program that stands on the line itself, so that
one of a virtual environment answers for itself."""

from __future__ import annotations

BASH = r"""# bash completion for snapctl; made by: snapctl completion bash
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
"""

ZSH = r"""#compdef snapctl
# zsh completion for snapctl; made by: snapctl completion zsh
_snapctl() {
    local kind line word program=${~words[1]}
    local -i width=0
    local -a answer whole whole_shown open open_shown
    answer=("${(@f)$("$program" __complete zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)}")
    kind=${answer[1]}
    case $kind in
        files) _files; return ;;
        dirs) _files -/; return ;;
    esac
    for line in "${(@)answer[2,-1]}"; do
        word=${line%%$'\t'*}
        (( width = $#word > width ? $#word : width ))
    done
    for line in "${(@)answer[2,-1]}"; do
        word=${line%%$'\t'*}
        [[ $line == *$'\t'* ]] && line=${(mr:COLUMNS-1:)${:-${(mr:width:)word}  ${line#*$'\t'}}}
        if [[ $word == *[/=:] ]]; then
            open+=("$word")
            open_shown+=("$line")
        else
            whole+=("$word")
            whole_shown+=("$line")
        fi
    done
    local -a listing
    [[ ${(j::)answer} == *$'\t'* ]] && listing=(-l)
    (( $#open )) && compadd -V open -S '' $listing -d open_shown -a open
    (( $#whole )) && compadd -V whole $listing -d whole_shown -a whole
    (( $#open + $#whole ))
}
if [[ $funcstack[1] == _snapctl ]]; then
    _snapctl "$@"
else
    compdef _snapctl snapctl
fi
"""

FISH = r"""# fish completion for snapctl; made by: snapctl completion fish
function __snapctl_complete
    set -l words (commandline -opc)
    set -l program (string replace -r '^~' $HOME -- $words[1])
    set -e words[1]
    set -l current (commandline -ct)
    set -l typed (string unescape -- $current; or string trim -l -c '"\'' -- $current)
    set -l answer ($program __complete fish $words "$typed" 2>/dev/null)
    set -l kind $answer[1]
    set -e answer[1]
    switch "$kind"
        case files
            __fish_complete_path $current
        case dirs
            __fish_complete_directories $current ''
        case '*'
            printf '%s\n' $answer
    end
end
complete -c snapctl -f -k -a '(__snapctl_complete)'
"""

SCRIPTS = {"bash": ("snapctl.bash", BASH), "zsh": ("_snapctl", ZSH), "fish": ("snapctl.fish", FISH)}
"""Name of the file and text of each shell's script."""
