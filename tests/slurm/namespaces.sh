#!/usr/bin/env bash
# The inside of a cluster; cluster.py starts it and says what it is.
#   namespaces.sh cluster BASE SUBNET LINK STARTER   the cluster: switch, /etc/hosts, munged, slurmctld; boots nodes
#   namespaces.sh node BASE SUBNET NUMBER            one node: cable, /dev/shm, slurmd
#   namespaces.sh sweep BASE FIRST_JOB LAST_JOB      what killed jobs left in the freezer
# The first two are the init of a PID namespace of their own: whoever kills them kills everything inside, and
# the network namespace, with all its cables, goes with the last process.
set -euo pipefail
verb=$1 base=$2

# A cable from the network of process $1 (end $2) to the caller's own (end $3, of hardware address $4). `netns 1` is
# the caller: `ip` runs in its PID namespace. Addresses are fixed: peers remember them for ten seconds and more, and a
# bridge left to itself changes its own with every port.
plug() { nsenter --net="/proc/$1/ns/net" ip link add "$2" type veth peer name "$3" address "$4" netns 1; }

cluster() {
    local subnet=$1 link=$2 starter=$3 number
    plug "$starter" "$link" uplink 02:00:00:00:00:fc
    nsenter --net="/proc/$starter/ns/net" ip address add "$subnet.253/24" dev "$link"
    nsenter --net="/proc/$starter/ns/net" ip link set "$link" up
    hostname controller
    mount --bind "$base/etc/hosts" /etc/hosts # of this mount namespace and of those the nodes derive from it
    mount -t proc proc /proc # only now: until here /proc named the starter
    ip link set lo up
    ip link add switch address 02:00:00:00:00:fe type bridge
    ip address add "$subnet.254/24" dev switch
    ip link set switch up
    ip link set uplink master switch up
    [ ! -d "$base/cgroup" ] || mount -t cgroup -o freezer cgroup "$base/cgroup/freezer"
    # As root munged warns about everything it does; --force lets it start all the same.
    munged --foreground --force --num-threads=2 --key-file="$base/etc/munge.key" --socket="$base/run/munge.sock" \
        --pid-file="$base/run/munged.pid" --seed-file="$base/run/munge.seed" --log-file="$base/log/munged.log" &
    until [ -S "$base/run/munge.sock" ]; do sleep 0.02; done
    slurmctld -D &
    exec 3<>"$base/run/boot" # for reading and writing, so that it never ends
    while read -r -u 3 number; do
        unshare --net --uts --mount --pid --fork --kill-child "$0" node "$base" "$subnet" "$number" 3<&- &
    done
}

node() {
    local subnet=$1 number=$2 switch=(nsenter --net=/proc/1/ns/net) # /proc is still the cluster's, process 1 its init
    hostname "n$number"
    "${switch[@]}" ip link delete "n$number" 2>/dev/null || true # the kernel may not yet have removed a dead node's
    plug 1 "n$number" eth0 "02:00:00:00:00:0$number"
    "${switch[@]}" ip link set "n$number" master switch up
    mount -t tmpfs -o size=2g tmpfs /dev/shm
    exec 3<> <(:)
    mount -t proc proc /proc
    ip link set lo up
    ip address add "$subnet.$number/24" dev eth0
    ip link set eth0 up
    slurmd -D -N "n$number" 3<&- &
    while :; do read -r -u 3 || true; done # never returns; bash adopts and reaps orphans meanwhile
}

sweep() {
    local first=$1 last=$2 root=$base/cgroup/freezer job number
    mount -t cgroup -o freezer cgroup "$root" # in a mount namespace of its own
    exec 3<"$root"
    flock 3 # as slurmstepd does: another cluster may be making directories
    for job in "$root"/slurm_n*/uid_*/job_*; do
        number=${job##*_}
        if [ -d "$job" ] && ((number >= first && number <= last)); then find "$job" -depth -type d -exec rmdir {} +; fi
    done
    for job in "$root"/slurm_n*/uid_* "$root"/slurm_n*; do
        [ ! -d "$job" ] || rmdir --ignore-fail-on-non-empty "$job"
    done
}

"$verb" "${@:3}"
