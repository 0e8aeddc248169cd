# Bindings that end, processes that are killed, and many transfers that leave nothing behind.
pool="pool=16777216"
large="sizes=20000000 seed=4"
settings >/tmp/before
bindings >/tmp/bindings

pair "out of device memory, into the pool" "interface=dm1 $pool send=yes expect=all $large" "interface=dm0 $pool send=yes expect=all $large"
met dm0.sent_devmem dm1.sent_devmem dm1.devmem_frags
pair "out of device memory, many" "interface=dm1 $pool send=yes expect=all shuffled=150x200000" "interface=dm0 $pool send=yes expect=all shuffled=150x200000"
pair "out of device memory, into host memory" "expect=plain $large" "interface=dm0 send=yes expect=plain $large"
echo 50 >/sys/module/dmsim/parameters/drop_every
pair "out of device memory, with drops" "interface=dm1 $pool send=yes expect=all $large" "interface=dm0 $pool send=yes expect=all $large"
echo 0 >/sys/module/dmsim/parameters/drop_every
met dm0.sent_devmem dm0.lost dm1.lost
# Sends may be far ahead of the chunks that are counted; those of a second round come later for
# certain.
twice="$large rounds=2"
pair "the binding for sending ends in the middle" "interface=dm1 $pool expect=moved $twice" "interface=dm0 send=yes unbind_after_sends=5 expect=moved $twice"
[ "$(grep -c 'bindings ended: [1-9]' /tmp/client)" = 1 ] || fail "no binding was ended"
met dm0.sent_devmem dm1.devmem_frags
grep -q 'checked 40000000 bytes, [1-9]' /tmp/server || fail "nothing came before it ended"
pair "the binding for receiving ends in the middle" "interface=dm1 $pool unbind_after=5 expect=moved $twice" "$twice"
[ "$(grep -c 'bindings ended: [1-9]' /tmp/server)" = 1 ] || fail "no binding was ended"
grep -q 'checked 40000000 bytes, [1-9]' /tmp/server || fail "nothing came before it ended"
unbound /tmp/bindings
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

# Both ends count their open descriptors after each connection, and tokens in the end. Rules and
# settings are counted here.
unbound /tmp/bindings
pair "ten thousand transfers over twenty connections" "interface=dm1 $pool connections=20 rounds=5 shuffled=50x3000" "interface=dm0 $pool connections=20 rounds=5 shuffled=50x3000"
settings >/tmp/after
same /tmp/before /tmp/after
[ "$(grep -hc 'transfers: 10000,' /tmp/server /tmp/client | tr -d '\n')" = 11 ] || fail "it was not ten thousand"
unbound /tmp/bindings

# A card that cannot send out of device memory: the processor sends, and all is well.
cards send=0
pair "a card that cannot send" "interface=dm1 $pool send=maybe expect=all $large" "interface=dm0 $pool send=maybe expect=all $large"
[ "$(grep -hc '^staged: ' /tmp/server /tmp/client | tr -d '\n')" = 11 ] || fail "nobody said that it cannot"
