// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Records what a Linux kernel answers on a device-memory socket: for each recvmsg the raw control
// bytes, the iovec's bytes and a hash of the pool under each device record; for each token return
// the ranges and the answer. Control bytes are walked with libc's macros, independent of the parser
// under test.
//
//   recorder receive INTERFACE PORT QUEUE BYTES MODE FILE [IOVEC_BYTES [RECORDS_OF_ROOM]]
//   recorder send ADDRESS PORT BYTES [PAUSE_AT]
//
// MODE is a list of words joined by commas:
//   each    return the tokens after every receive
//   hold    return all tokens at the end, and four of them a second time
//   odd     with `hold`: even tokens first, then odd ones
//   late    receive only when all bytes have arrived
//   stamp   ask for receive timestamps too, whose control message stands among the others
//   unbind  half way close the binding's netlink socket, then ask the sender to go on
// The sender stops at PAUSE_AT until the receiver asks.
//
// The stream's byte at position i is pattern(i). The file's layout is in README.md beside this
// file.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/genetlink.h>
#include <linux/netlink.h>
#include <linux/udmabuf.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { LINEAR = 78, DMABUF = 79, DONTNEED = 80, FLAG_DEVMEM = 0x2000000 };
enum { MOST_RANGES = 128, MOST_FRAGMENTS = 1024, MOST_HELD = 1 << 16 };

struct record { uint64_t offset; uint32_t size, token, dmabuf, flags; };
struct range { uint32_t start, count; };

static FILE *out;

static void stop(const char *what)
{
	fprintf(stderr, "recorder: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void check(int failed, const char *what)
{
	if (failed)
		stop(what);
}

static uint8_t pattern(uint64_t at)
{
	return (at * 0x9E3779B97F4A7C15ull) >> 56;
}

static uint64_t fnv1a(const uint8_t *bytes, size_t length)
{
	uint64_t hash = 0xCBF29CE484222325ull;

	while (length--)
		hash = (hash ^ *bytes++) * 0x100000001B3ull;
	return hash;
}

static void put(const void *bytes, size_t length)
{
	check(fwrite(bytes, 1, length, out) != length, "write");
}

static void put64(uint64_t value) { put(&value, 8); }

// ---- netlink: just enough to bind a dma-buf to a queue ----

static char request[4096];
static struct nlmsghdr *const header = (void *)request;

static void begin(int family, int command, int version)
{
	static uint32_t sequence;
	struct genlmsghdr *generic = NLMSG_DATA(header);

	memset(request, 0, sizeof request);
	*header = (struct nlmsghdr){ NLMSG_LENGTH(GENL_HDRLEN), family, NLM_F_REQUEST | NLM_F_ACK, ++sequence, 0 };
	generic->cmd = command;
	generic->version = version;
}

static struct nlattr *attribute(int type, const void *value, int length)
{
	struct nlattr *at = (void *)(request + NLMSG_ALIGN(header->nlmsg_len));

	at->nla_type = type;
	at->nla_len = NLA_HDRLEN + length;
	if (length)
		memcpy((char *)at + NLA_HDRLEN, value, length);
	header->nlmsg_len = NLMSG_ALIGN(header->nlmsg_len) + NLA_ALIGN(at->nla_len);
	return at;
}

static void attribute32(int type, uint32_t value) { attribute(type, &value, 4); }

// Sends the request; gives the first attribute `wanted` of the answer, 2 or 4 bytes.
static uint32_t exchange(int netlink, int wanted)
{
	static char answer[16384];
	uint32_t found = 0;

	check(send(netlink, request, header->nlmsg_len, 0) < 0, "netlink send");
	for (;;) {
		int left = recv(netlink, answer, sizeof answer, 0);

		check(left < 0, "netlink receive");
		for (struct nlmsghdr *m = (void *)answer; NLMSG_OK(m, left); m = NLMSG_NEXT(m, left)) {
			if (m->nlmsg_type == NLMSG_ERROR) {
				errno = -((struct nlmsgerr *)NLMSG_DATA(m))->error;
				check(errno, "netlink answer");
				return found;
			}
			char *end = (char *)m + m->nlmsg_len, *at = (char *)NLMSG_DATA(m) + GENL_HDRLEN;
			while (at + NLA_HDRLEN <= end) {
				struct nlattr *a = (void *)at;
				int size = a->nla_len - NLA_HDRLEN;

				if ((a->nla_type & NLA_TYPE_MASK) == wanted && !found && (size == 2 || size == 4))
					memcpy(&found, at + NLA_HDRLEN, size);
				at += NLA_ALIGN(a->nla_len);
			}
		}
	}
}

static uint32_t bind_queue(int netlink, const char *interface, uint32_t queue, int dmabuf)
{
	enum { BIND_RX = 13, IFINDEX = 1, QUEUES = 2, FD = 3, ID = 4, QUEUE_ID = 1, QUEUE_TYPE = 3 };

	begin(GENL_ID_CTRL, CTRL_CMD_GETFAMILY, 1);
	attribute(CTRL_ATTR_FAMILY_NAME, "netdev", 7);
	int family = exchange(netlink, CTRL_ATTR_FAMILY_ID);

	begin(family, BIND_RX, 1);
	attribute32(IFINDEX, if_nametoindex(interface));
	struct nlattr *nest = attribute(QUEUES | NLA_F_NESTED, NULL, 0);
	attribute32(QUEUE_ID, queue);
	attribute32(QUEUE_TYPE, 0);
	nest->nla_len = request + header->nlmsg_len - (char *)nest;
	attribute32(FD, dmabuf);
	return exchange(netlink, ID);
}

static int make_pool(size_t bytes, uint8_t **memory)
{
	int memfd = memfd_create("pool", MFD_ALLOW_SEALING), device = open("/dev/udmabuf", O_RDWR);
	struct udmabuf_create create = { .memfd = memfd, .flags = UDMABUF_FLAGS_CLOEXEC, .size = bytes };

	check(memfd < 0 || device < 0, "memfd or /dev/udmabuf");
	check(ftruncate(memfd, bytes) || fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK), "pool size");
	*memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
	check(*memory == MAP_FAILED, "mmap");
	int dmabuf = ioctl(device, UDMABUF_CREATE, &create);
	check(dmabuf < 0, "UDMABUF_CREATE");
	return dmabuf;
}

// ---- tokens ----

static uint32_t held[MOST_HELD];
static size_t holding;

static int by_value(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

static void give_back(int connection, const struct range *ranges, uint32_t count, char kind)
{
	int64_t answer = setsockopt(connection, SOL_SOCKET, DONTNEED, ranges, count * sizeof *ranges);

	if (answer < 0)
		answer = -errno;
	put(&kind, 1);
	put64(count);
	put(ranges, count * sizeof *ranges);
	put64(answer);
}

// Returns tokens ascending, neighbours joined, within the kernel's limits.
static void return_tokens(int connection, uint32_t *tokens, size_t count)
{
	struct range ranges[MOST_RANGES];
	uint32_t used = 0, fragments = 0;

	qsort(tokens, count, sizeof *tokens, by_value);
	for (size_t i = 0; i < count; i++) {
		struct range *last = used ? &ranges[used - 1] : NULL;
		int joins = last && last->start + last->count == tokens[i];

		if (fragments == MOST_FRAGMENTS || (!joins && used == MOST_RANGES)) {
			give_back(connection, ranges, used, 'T');
			used = fragments = joins = 0;
		}
		if (joins)
			last->count++;
		else
			ranges[used++] = (struct range){ tokens[i], 1 };
		fragments++;
	}
	if (used)
		give_back(connection, ranges, used, 'T');
}

static void return_held(int connection, int by_parity)
{
	static uint32_t some[MOST_HELD];

	if (!holding)
		return;
	for (uint32_t odd = 0; by_parity && odd < 2; odd++) {
		size_t count = 0;

		for (size_t i = 0; i < holding; i++)
			if ((held[i] & 1) == odd)
				some[count++] = held[i];
		return_tokens(connection, some, count);
	}
	if (!by_parity)
		return_tokens(connection, held, holding);
	// A second time: what the kernel answers to tokens that are not outstanding.
	give_back(connection, &(struct range){ held[0], 4 }, 1, 'X');
	holding = 0;
}

// ---- receive ----

static uint8_t iovec_memory[1 << 20];
static char control[CMSG_SPACE(sizeof(struct record)) * 1024];

// One recvmsg and its event; what it returned.
static int64_t receive_once(int connection, const uint8_t *pool, size_t iovec_bytes, size_t room, uint64_t at)
{
	struct iovec vector = { iovec_memory, iovec_bytes };
	struct msghdr m = { .msg_iov = &vector, .msg_iovlen = 1, .msg_control = room ? control : NULL, .msg_controllen = room };
	uint64_t linear = 0, devices = 0, records = 0;

	memset(control, 0xA5, sizeof control);
	int64_t received = recvmsg(connection, &m, FLAG_DEVMEM);
	if (received < 0) {
		received = -errno;
		m.msg_controllen = 0;
	}
	put("R", 1);
	put64(at);
	put64(received);
	put64(m.msg_flags);
	put64(iovec_bytes);
	put64(room);
	put64(m.msg_controllen);
	put(control, m.msg_controllen);
	for (int pass = 0; pass < 2; pass++) {
		if (pass) {
			uint64_t written = received < 0 ? 0 : records ? linear : (uint64_t)received;

			put64(written);
			put(iovec_memory, written);
			put64(devices);
		}
		if (received < 0)
			continue;
		for (struct cmsghdr *h = CMSG_FIRSTHDR(&m); h; h = CMSG_NXTHDR(&m, h)) {
			struct record r;

			if (h->cmsg_level != SOL_SOCKET || (h->cmsg_type != LINEAR && h->cmsg_type != DMABUF))
				continue;
			memcpy(&r, CMSG_DATA(h), sizeof r);
			if (pass && h->cmsg_type == DMABUF) {
				put64(fnv1a(pool + r.offset, r.size));
				held[holding++] = r.token;
			} else if (!pass) {
				records++;
				devices += h->cmsg_type == DMABUF;
				linear += h->cmsg_type == LINEAR ? r.size : 0;
			}
		}
	}
	return received;
}

// Until so many bytes wait in the socket; at most ten seconds.
static void wait_for(int connection, uint64_t bytes)
{
	for (int tries = 0, waiting = 0; tries < 1000; tries++) {
		check(ioctl(connection, FIONREAD, &waiting), "FIONREAD");
		if ((uint64_t)waiting >= bytes)
			return;
		usleep(10000);
	}
	errno = ETIMEDOUT;
	stop("waiting for the stream");
}

static int receive(int count, char **words)
{
	size_t pool_bytes = 32 << 20, iovec_bytes = count > 6 ? strtoul(words[6], NULL, 0) : sizeof iovec_memory;
	size_t room = count > 7 ? strtoul(words[7], NULL, 0) * CMSG_SPACE(sizeof(struct record)) : sizeof control;
	uint64_t wanted = strtoull(words[3], NULL, 0), at = 0;
	int hold = !!strstr(words[4], "hold"), unbind = !!strstr(words[4], "unbind");
	int refusals = 0, one = 1, window = 4 << 20;
	uint8_t *pool;

	out = fopen(words[5], "wb");
	check(!out, words[5]);
	int dmabuf = make_pool(pool_bytes, &pool);
	int netlink = socket(AF_NETLINK, SOCK_RAW, NETLINK_GENERIC);
	check(netlink < 0, "netlink");
	uint64_t id = bind_queue(netlink, words[0], atoi(words[2]), dmabuf);
	put("DEVMEM01", 8);
	put64(pool_bytes);
	put64(id);

	int listener = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(atoi(words[1])) };
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	setsockopt(listener, SOL_SOCKET, SO_RCVBUFFORCE, &window, sizeof window);
	check(bind(listener, (void *)&address, sizeof address) || listen(listener, 1), "listen");
	int connection = accept(listener, NULL, NULL);
	check(connection < 0, "accept");

	if (strstr(words[4], "stamp"))
		check(setsockopt(connection, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one), "SO_TIMESTAMPNS");
	if (strstr(words[4], "late"))
		wait_for(connection, wanted);
	while (at < wanted) {
		if (unbind && at >= wanted / 2) {
			close(netlink);
			put("U", 1);
			check(send(connection, "!", 1, MSG_NOSIGNAL) != 1, "ask the sender");
			unbind = 0;
		}
		int64_t received = receive_once(connection, pool, iovec_bytes, room, at);
		if (received == -525 && !refusals++) {	// No room for a record: once recorded, then one record's room.
			room = CMSG_SPACE(sizeof(struct record));
			continue;
		}
		check(received <= 0, "recvmsg");
		at += received;
		if (!hold) {
			return_tokens(connection, held, holding);
			holding = 0;
		}
	}
	return_held(connection, !!strstr(words[4], "odd"));
	check(fclose(out), "close");
	close(connection);
	return 0;
}

static int send_stream(int count, char **words)
{
	static uint8_t block[1 << 16];
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(atoi(words[1])) };
	uint64_t wanted = strtoull(words[2], NULL, 0), pause = count > 3 ? strtoull(words[3], NULL, 0) : 0;
	int connection = -1;

	inet_pton(AF_INET, words[0], &address.sin_addr);
	for (int attempt = 0; attempt < 100 && connection < 0; attempt++) {
		connection = socket(AF_INET, SOCK_STREAM, 0);
		if (connect(connection, (void *)&address, sizeof address)) {
			close(connection);
			connection = -1;
			usleep(50000);	// The receiver may not listen yet.
		}
	}
	check(connection < 0, "connect");
	for (uint64_t at = 0; at < wanted;) {
		uint64_t end = at < pause ? pause : wanted;
		size_t length = end - at < sizeof block ? end - at : sizeof block;

		if (pause && at == pause)
			check(recv(connection, block, 1, 0) != 1, "the receiver's word");
		for (size_t i = 0; i < length; i++)
			block[i] = pattern(at + i);
		ssize_t sent = send(connection, block, length, MSG_NOSIGNAL);
		check(sent <= 0, "send");
		at += sent;
	}
	shutdown(connection, SHUT_WR);
	while (recv(connection, block, sizeof block, 0) > 0)
		;
	return 0;
}

int main(int count, char **words)
{
	if (count >= 8 && !strcmp(words[1], "receive"))
		return receive(count - 2, words + 2);
	if (count >= 5 && !strcmp(words[1], "send"))
		return send_stream(count - 2, words + 2);
	fprintf(stderr, "recorder: see the head of recorder.c\n");
	return 2;
}
