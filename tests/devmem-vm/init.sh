#!/bin/busybox sh
# The first process of the machine: a receiver's card dm1 (10.0.0.2) here, the sender's dm0
# (10.0.0.1) in the network namespace snd. Runs the one script there is and says how it ended.
/bin/busybox --install -s /bin
rm /bin/ip
export PATH=/tcpx:/bin:/usr/bin:/usr/sbin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mount -t debugfs debug /sys/kernel/debug
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
	# What ethtool does not tell apart: a split that is off, and one that the driver may turn on.
	ethtool -S dm1 | grep split_setting
}
# counters: what the cards have counted, as CARD.NAME VALUE
counters() {
	ethtool -S dm1 | sed -n 's/^ *\(.*\): \(.*\)/dm1.\1 \2/p'
	sender ethtool -S dm0 | sed -n 's/^ *\(.*\): \(.*\)/dm0.\1 \2/p'
}
# mark: from here on, met looks
mark() { counters >/tmp/mark; }
# rose CARD.NAME: by how much, since the mark
rose() { counters | cat /tmp/mark - | awk -v name="$1" '$1 == name { was = now; now = $2 } END { print now - was }'; }
# met CARD.NAME...: each has been counted since the mark, so what the test is about was really there
met() {
	for counter in "$@"; do
		times=$(rose "$counter")
		[ "$times" -gt 0 ] || fail "$counter: nothing of it was met"
		echo "  $counter: $times"
	done
}
# gro on|off: whether either card's packets are joined. Joined, small packets that are linear
# throughout mix with fragments, and the kernel can then hand out neither (ENODEV), now and then if
# few packets are so small.
gro() {
	ethtool -K dm1 gro "$1"
	sender ethtool -K dm0 gro "$1"
}
# bindings: what is bound, in either direction, and the memory that bindings hold
bindings() {
	devmem_setup bound dm1
	sender devmem_setup bound dm0
	sed -n 's/^Total \([0-9]*\) objects.*/dma-bufs: \1/p' /sys/kernel/debug/dma_buf/bufinfo
}
# unbound FILE: waits until the bindings are those of the file; the kernel ends them a little later
unbound() {
	tries=0
	until bindings | cmp -s - "$1"; do
		tries=$((tries + 1))
		[ $tries -lt 600 ] || { bindings | diff "$1" -; fail "bindings are left"; }
		usleep 100000
	done
	sed 's/^/  /' "$1"
}
# says WORDS FILE PID: until it does
says() {
	tries=0
	until grep -q "$1" "$2"; do
		tries=$((tries + 1))
		[ $tries -lt 600 ] && kill -0 "$3" 2>/dev/null || { cat "$2"; fail "it did not say $1"; }
		usleep 100000
	done
}
# afresh: nobody is to read what the last ones wrote; a process empties its file only once it runs
afresh() {
	: >/tmp/server
	: >/tmp/client
}
# pair NAME SERVER CLIENT: both ends with these arguments, the server at the receiver's card
pair() {
	echo "- $1"
	afresh
	mark
	devmem_peer listen=5000 $2 >/tmp/server 2>&1 &
	server=$!
	says listening /tmp/server $server
	sender devmem_peer connect=10.0.0.2:5000 $3 >/tmp/client 2>&1 || { cat /tmp/client /tmp/server; fail "$1: client"; }
	wait $server || { cat /tmp/client /tmp/server; fail "$1: server"; }
	grep -hE '^(Totals|moved|bindings|staged|checked|tokens)' /tmp/server /tmp/client
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
