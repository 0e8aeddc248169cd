# Bindings that end, processes that are killed, and many transfers that leave nothing behind.
# afresh: nobody is to read what the last ones wrote; a process empties its file only once it runs
afresh() {
	: >/tmp/server
	: >/tmp/client
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
# pair NAME SERVER CLIENT: both ends with these arguments, the server at the receiver's card
pair() {
	echo "- $1"
	afresh
	devmem_peer listen=5000 $2 >/tmp/server 2>&1 &
	server=$!
	says listening /tmp/server $server
	sender devmem_peer connect=10.0.0.2:5000 $3 >/tmp/client 2>&1 || { cat /tmp/client /tmp/server; fail "$1: client"; }
	wait $server || { cat /tmp/client /tmp/server; fail "$1: server"; }
	grep -hE '^(Totals|moved|bindings)' /tmp/server /tmp/client
}
pool="pool=16777216"
large="sizes=20000000 seed=4"
settings >/tmp/before

pair "out of device memory, into the pool" "interface=dm1 $pool send=yes expect=all $large" "interface=dm0 $pool send=yes expect=all $large"
pair "out of device memory, many" "interface=dm1 $pool send=yes expect=all shuffled=150x200000" "interface=dm0 $pool send=yes expect=all shuffled=150x200000"
pair "out of device memory, into host memory" "expect=plain $large" "interface=dm0 send=yes expect=plain $large"
echo 50 >/sys/module/dmsim/parameters/drop_every
pair "out of device memory, with drops" "interface=dm1 $pool send=yes expect=all $large" "interface=dm0 $pool send=yes expect=all $large"
echo 0 >/sys/module/dmsim/parameters/drop_every
# Sends may be far ahead of the chunks that are counted; those of a second round come later for certain.
twice="$large rounds=2"
pair "the binding for sending ends in the middle" "interface=dm1 $pool expect=moved $twice" "interface=dm0 send=yes unbind_after=5 expect=moved $twice"
pair "the binding for receiving ends in the middle" "interface=dm1 $pool unbind_after=5 expect=moved $twice" "$twice"
[ "$(grep -c 'bindings ended: [1-9]' /tmp/server)" = 1 ] || fail "no binding was ended"

settings >/tmp/after
same /tmp/before /tmp/after

echo "- the sender is killed, and another one comes"
long="sizes=10000000 seed=9 rounds=1000 rounds_shown=yes"
afresh
devmem_peer listen=5000 interface=dm1 queue=3 $pool $long >/tmp/server 2>&1 &
server=$!
says listening /tmp/server $server
sender devmem_peer connect=10.0.0.2:5000 $long >/tmp/client 2>&1 &
client=$!
says 'round 2' /tmp/client $client
kill -9 "$(sed -n 's/^pid //p' /tmp/client)"
wait $client || true
wait $server && { cat /tmp/server; fail "half a transfer ended well"; }
settings >/tmp/after
same /tmp/before /tmp/after

echo "- the receiver is killed, and binds the same queue again"
afresh
devmem_peer listen=5000 interface=dm1 queue=3 $pool $long >/tmp/server 2>&1 &
server=$!
says listening /tmp/server $server
sender devmem_peer connect=10.0.0.2:5000 $long >/tmp/client 2>&1 &
client=$!
says 'round 2' /tmp/client $client
kill -9 "$(sed -n 's/^pid //p' /tmp/server)"
wait $server || true
wait $client && { cat /tmp/client; fail "half a transfer ended well"; }
pair "with the same queue" "interface=dm1 queue=3 $pool expect=all $large" "$large"
settings >/tmp/after
same /tmp/before /tmp/after

# Both ends count their open descriptors after each connection.
pair "ten thousand transfers over twenty connections" "interface=dm1 $pool connections=20 rounds=5 shuffled=50x3000" "interface=dm0 $pool connections=20 rounds=5 shuffled=50x3000"
settings >/tmp/after
same /tmp/before /tmp/after
