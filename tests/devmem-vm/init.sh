#!/bin/busybox sh
# The first process of the machine: a receiver's card dm1 (10.0.0.2) here, the sender's dm0 (10.0.0.1) in
# the network namespace snd. Runs the one script there is and says how it ended.
/bin/busybox --install -s /bin
rm /bin/ip
export PATH=/tcpx:/bin:/usr/bin:/usr/sbin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mkdir -p /run/netns /etc

# The shell would take its own.
ip() { /usr/bin/ip "$@"; }
# cards [PARAMETER=VALUE...]: makes both anew
cards() {
	rmmod dmsim 2>/dev/null
	ip netns del snd 2>/dev/null
	insmod /dmsim.ko "$@" || return
	ip link set lo up
	ip netns add snd
	ip link set dm0 netns snd
	sender ip link set lo up
	sender ip addr add 10.0.0.1/24 dev dm0
	sender ip link set dm0 up
	ip addr add 10.0.0.2/24 dev dm1
	ip link set dm1 up
}
# sender COMMAND...: runs it at the sender
sender() { ip netns exec snd "$@"; }
# settings: every setting of the receiver's card that ours may change, by a judge that is not ours
settings() {
	ethtool -g dm1 | grep -iE 'split'
	devmem_setup threshold dm1
	ethtool -k dm1 | grep ntuple
	ethtool -x dm1
	ethtool -n dm1
}
fail() { echo "FAILED: $*"; exit 1; }
# same BEFORE AFTER: two files of settings
same() { cmp -s "$1" "$2" || { diff "$1" "$2"; fail "settings differ: $1 $2"; }; }

cards || poweroff -f
echo START
dmesg -c >/dev/null
(
	set -e
	. /test.sh
) 2>&1
status=$?
if dmesg | grep -iE 'warn|bug:|oops:|stall|leak'; then status=99; fi
echo "END $status"
poweroff -f
