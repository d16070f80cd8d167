# fish completion for snapctl; made by: snapctl completion fish
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
