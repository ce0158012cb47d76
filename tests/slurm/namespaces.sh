#!/usr/bin/env bash
# The processes of a cluster; cluster.py starts them and documents the cluster.
#   namespaces.sh cluster BASE SUBNET LINK STARTER   the cluster: switch, /etc/hosts, munged, slurmctld; boots nodes
#   namespaces.sh node BASE SUBNET NUMBER            one node: cable, /dev/shm, slurmd
#   namespaces.sh sweep BASE FIRST_JOB LAST_JOB      remove the freezer directories of killed jobs
# The first two are each the init of a PID namespace: killing them kills everything inside, and the network namespace
# is removed with its cables once the last process has ended.
set -euo pipefail
verb=$1 base=$2

# A cable from the network of process $1 (end $2) to the caller's network (end $3, hardware address $4). `netns 1` is
# the caller: `ip` runs in its PID namespace. Addresses are fixed because peers cache them for ten seconds or more, and
# a bridge otherwise changes its address with every port.
plug() { nsenter --net="/proc/$1/ns/net" ip link add "$2" type veth peer name "$3" address "$4" netns 1; }

cluster() {
    local subnet=$1 link=$2 starter=$3 number
    plug "$starter" "$link" uplink 02:00:00:00:00:fc
    nsenter --net="/proc/$starter/ns/net" ip address add "$subnet.253/24" dev "$link"
    nsenter --net="/proc/$starter/ns/net" ip link set "$link" up
    hostname controller
    mount --bind "$base/etc/hosts" /etc/hosts # for this mount namespace and those of the nodes, which derive from it
    mount -t proc proc /proc # only now: until here /proc was that of the starter
    ip link set lo up
    ip link add switch address 02:00:00:00:00:fe type bridge
    ip address add "$subnet.254/24" dev switch
    ip link set switch up
    ip link set uplink master switch up
    [ ! -d "$base/cgroup" ] || mount -t cgroup -o freezer cgroup "$base/cgroup/freezer"
    # munged run as root prints warnings; --force makes it start nevertheless.
    munged --foreground --force --num-threads=2 --key-file="$base/etc/munge.key" --socket="$base/run/munge.sock" \
        --pid-file="$base/run/munged.pid" --seed-file="$base/run/munge.seed" --log-file="$base/log/munged.log" &
    until [ -S "$base/run/munge.sock" ]; do sleep 0.02; done
    slurmctld -D &
    exec 3<>"$base/run/boot" # for reading and writing, so that no end of file is read
    while read -r -u 3 number; do
        unshare --net --uts --mount --pid --fork --kill-child "$0" node "$base" "$subnet" "$number" 3<&- &
    done
}

node() {
    local subnet=$1 number=$2 switch=(nsenter --net=/proc/1/ns/net) # /proc is still that of the cluster, process 1 its init
    hostname "n$number"
    "${switch[@]}" ip link delete "n$number" 2>/dev/null || true # the kernel may not have removed that of a dead node yet
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
    mount -t cgroup -o freezer cgroup "$root" # in a separate mount namespace
    exec 3<"$root"
    flock 3 # as slurmstepd does: another cluster may be creating directories
    for job in "$root"/slurm_n*/uid_*/job_*; do
        number=${job##*_}
        if [ -d "$job" ] && ((number >= first && number <= last)); then find "$job" -depth -type d -exec rmdir {} +; fi
    done
    for job in "$root"/slurm_n*/uid_* "$root"/slurm_n*; do
        [ ! -d "$job" ] || rmdir --ignore-fail-on-non-empty "$job"
    done
}

"$verb" "${@:3}"
