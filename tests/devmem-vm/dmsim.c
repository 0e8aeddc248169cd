// SPDX-License-Identifier: GPL-2.0
/*
 * dmsim - test-only pair of back-to-back network devices whose receive queues
 * accept an unreadable-memory provider (devmem TCP, io_uring zcrx).
 * "DMA" is a memcpy to phys_to_virt(bus address): no IOMMU, RAM-backed dma-bufs
 * (udmabuf) only.
 */
#include <linux/module.h>
#include <linux/platform_device.h>
#include <linux/dma-mapping.h>
#include <linux/dma-direct.h>
#include <linux/etherdevice.h>
#include <linux/ethtool.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/netdevice.h>
#include <net/netdev_lock.h>
#include <net/netdev_queues.h>
#include <net/netdev_rx_queue.h>
#include <net/page_pool/helpers.h>
#include <net/page_pool/types.h>

#define NQ 4
#define INDIR 64
#define NRULES 64
#define QLEN 4096

static unsigned int drop_every;
module_param(drop_every, uint, 0644);
static unsigned int hds_miss_every;
module_param(hds_miss_every, uint, 0644);
static unsigned int hds_miss_bytes = 100;
module_param(hds_miss_bytes, uint, 0644);
static unsigned int pack;
module_param(pack, uint, 0644);
MODULE_PARM_DESC(pack, "carve page fragments instead of one niov per chunk");

/* what drivers without support lack; read when the devices are made */
static bool queue_ops = true;
module_param(queue_ops, bool, 0444);
static bool dma = true;
module_param(dma, bool, 0644);
static bool send = true;
module_param(send, bool, 0444);

struct dmsim_rxq {
	struct napi_struct napi;
	struct sk_buff_head in;
	struct page_pool *pp;
	u32 psize;
	u64 n, devmem_frags, nobufs, packed, unsplit, large;
};

struct dmsim_rule {
	bool used;
	struct ethtool_rx_flow_spec fs;
};

struct dmsim {
	struct net_device *dev;
	struct dmsim *peer;
	struct device *dma_dev;
	struct dmsim_rxq rxq[NQ];
	atomic64_t lost, sent_devmem;
	struct dmsim_rule rule[NRULES];
	u32 indir[INDIR];
	u8 key[40];
};

static struct platform_device *pdev[2];
static struct dmsim *pair[2];

/* ---- "wire" ---- */
static void *bus_to_cpu(struct dmsim *ds, dma_addr_t a)
{
	return phys_to_virt(dma_to_phys(ds->dma_dev, a));
}

static void *nm_addr(struct dmsim *ds, netmem_ref nm)
{
	if (netmem_is_net_iov(nm))
		return bus_to_cpu(ds, page_pool_get_dma_addr_netmem(nm));
	return netmem_address(nm);
}

static struct sk_buff *wire_copy(struct dmsim *ds, struct sk_buff *skb)
{
	struct sk_buff *n = alloc_skb(skb->len + NET_IP_ALIGN, GFP_ATOMIC);
	int i;

	if (!n)
		return NULL;
	skb_reserve(n, NET_IP_ALIGN);
	if (skb_frags_readable(skb)) {
		if (skb_copy_bits(skb, 0, skb_put(n, skb->len), skb->len)) {
			kfree_skb(n);
			return NULL;
		}
	} else {
		skb_put_data(n, skb->data, skb_headlen(skb));
		for (i = 0; i < skb_shinfo(skb)->nr_frags; i++) {
			const skb_frag_t *f = &skb_shinfo(skb)->frags[i];

			skb_put_data(n, nm_addr(ds, skb_frag_netmem(f)) +
				     skb_frag_off(f), skb_frag_size(f));
		}
		atomic64_add(i, &ds->sent_devmem);
	}
	skb_shinfo(n)->gso_size = skb_shinfo(skb)->gso_size;
	skb_shinfo(n)->gso_type = skb_shinfo(skb)->gso_type;
	skb_shinfo(n)->gso_segs = skb_shinfo(skb)->gso_segs;
	return n;
}

static bool rule_hit(struct ethtool_rx_flow_spec *fs, struct sk_buff *w)
{
	const struct iphdr *ip = (void *)w->data + ETH_HLEN;
	const struct tcphdr *th;

	if (w->len < ETH_HLEN + sizeof(*ip) + sizeof(*th) ||
	    ((struct ethhdr *)w->data)->h_proto != htons(ETH_P_IP) ||
	    ip->protocol != IPPROTO_TCP)
		return false;
	th = (void *)ip + ip->ihl * 4;
#define M(f, v) (((fs->h_u.tcp_ip4_spec.f ^ (v)) & fs->m_u.tcp_ip4_spec.f) == 0)
	return M(ip4src, ip->saddr) && M(ip4dst, ip->daddr) &&
	       M(psrc, th->source) && M(pdst, th->dest);
}

static int pick_rxq(struct dmsim *ds, struct sk_buff *w)
{
	const struct iphdr *ip = (void *)w->data + ETH_HLEN;
	u32 h = 0;
	int i;

	for (i = 0; i < NRULES; i++)
		if (ds->rule[i].used && rule_hit(&ds->rule[i].fs, w))
			return ds->rule[i].fs.ring_cookie % NQ;
	if (w->len >= ETH_HLEN + 24 &&
	    ((struct ethhdr *)w->data)->h_proto == htons(ETH_P_IP) &&
	    ip->protocol == IPPROTO_TCP)
		h = *(u32 *)((void *)ip + ip->ihl * 4) * 2654435761u >> 16;
	return ds->indir[h % INDIR] % NQ;
}

static netdev_tx_t dmsim_xmit(struct sk_buff *skb, struct net_device *dev)
{
	struct dmsim *ds = netdev_priv(dev), *peer = ds->peer;
	unsigned int len = skb->len;
	struct dmsim_rxq *q;
	struct sk_buff *w;
	static atomic_t cnt;

	if (!peer || !netif_running(peer->dev))
		goto drop;
	if (drop_every && atomic_inc_return(&cnt) % drop_every == 0) {
		atomic64_inc(&ds->lost);
		goto drop;
	}
	w = wire_copy(ds, skb);
	if (!w)
		goto drop;
	q = &peer->rxq[pick_rxq(peer, w)];
	if (skb_queue_len(&q->in) > QLEN) {
		kfree_skb(w);
		goto drop;
	}
	skb_queue_tail(&q->in, w);
	napi_schedule(&q->napi);
	dev_dstats_tx_add(dev, len);
	dev_consume_skb_any(skb);
	return NETDEV_TX_OK;
drop:
	dev_dstats_tx_dropped(dev);
	dev_kfree_skb_any(skb);
	return NETDEV_TX_OK;
}

/* ---- receive ---- */
static struct sk_buff *rx_build(struct dmsim *ds, struct dmsim_rxq *q,
				struct sk_buff *w)
{
	u32 hlen = eth_get_headlen(ds->dev, w->data, w->len), off;
	const struct iphdr *ip = (void *)w->data + ETH_HLEN;
	__be16 proto = ((struct ethhdr *)w->data)->h_proto;
	struct sk_buff *skb;
	int nr = 0;
	bool tcp;

	tcp = (proto == htons(ETH_P_IP) && ip->protocol == IPPROTO_TCP) ||
	      (proto == htons(ETH_P_IPV6) &&
	       ((struct ipv6hdr *)ip)->nexthdr == IPPROTO_TCP);
	if (tcp && proto == htons(ETH_P_IP)) /* strip ethernet padding */
		skb_trim(w, ETH_HLEN + ntohs(ip->tot_len));
	if (!tcp || ds->dev->cfg->hds_config != ETHTOOL_TCP_DATA_SPLIT_ENABLED ||
	    w->len <= ds->dev->cfg->hds_thresh)
		hlen = w->len;
	q->n++;
	if (hds_miss_every && q->n % hds_miss_every == 0 && hlen < w->len) {
		hlen += min(w->len - hlen, hds_miss_bytes);
		q->unsplit++;
	}
	if (w->len > ETH_HLEN + ETH_DATA_LEN && hlen < w->len)
		q->large++;

	skb = napi_alloc_skb(&q->napi, hlen);
	if (!skb)
		return NULL;
	skb_put_data(skb, w->data, hlen);
	for (off = hlen; off < w->len;) {
		u32 noff = 0, chunk = min(w->len - off, q->psize);
		u32 truesize = q->psize;
		netmem_ref nm = 0;

		if (nr == MAX_SKB_FRAGS)
			;
		else if (pack && chunk <= q->psize / 2) {
			truesize = ALIGN(chunk, 64);
			nm = page_pool_alloc_frag_netmem(q->pp, &noff, truesize,
						GFP_ATOMIC | __GFP_NOWARN);
			if (noff)
				q->packed++;
		} else {
			nm = page_pool_alloc_netmems(q->pp,
						GFP_ATOMIC | __GFP_NOWARN);
		}
		if (!nm) {
			q->nobufs++;
			skb_mark_for_recycle(skb);
			kfree_skb(skb);
			return NULL;
		}
		memcpy(nm_addr(ds, nm) + noff, w->data + off, chunk);
		if (netmem_is_net_iov(nm))
			q->devmem_frags++;
		skb_add_rx_frag_netmem(skb, nr++, nm, noff, chunk, truesize);
		off += chunk;
	}
	skb_mark_for_recycle(skb);
	skb_shinfo(skb)->gso_size = skb_shinfo(w)->gso_size;
	skb_shinfo(skb)->gso_type = skb_shinfo(w)->gso_type;
	skb_shinfo(skb)->gso_segs = skb_shinfo(w)->gso_segs;
	skb->ip_summed = CHECKSUM_UNNECESSARY;
	skb->protocol = eth_type_trans(skb, ds->dev);
	skb_record_rx_queue(skb, q - ds->rxq);
	return skb;
}

static int dmsim_poll(struct napi_struct *napi, int budget)
{
	struct dmsim_rxq *q = container_of(napi, struct dmsim_rxq, napi);
	struct dmsim *ds = netdev_priv(napi->dev);
	struct sk_buff *w, *skb;
	int done = 0;

	while (done < budget && (w = skb_dequeue(&q->in))) {
		unsigned int len = w->len;

		skb = rx_build(ds, q, w);
		consume_skb(w);
		done++;
		if (!skb) {
			dev_dstats_rx_dropped(ds->dev);
			continue;
		}
		dev_dstats_rx_add(ds->dev, len);
		napi_gro_receive(napi, skb);
	}
	if (done < budget && napi_complete_done(napi, done) &&
	    !skb_queue_empty(&q->in))
		napi_schedule(napi);
	return done;
}

static struct page_pool *mkpool(struct dmsim *ds, int idx, u32 psize)
{
	struct page_pool_params p = {
		.order = get_order(psize),
		.pool_size = 512,
		.nid = NUMA_NO_NODE,
		.dev = ds->dma_dev,
		.napi = &ds->rxq[idx].napi,
		.dma_dir = DMA_FROM_DEVICE,
		.max_len = psize,
		.netdev = ds->dev,
		.queue_idx = idx,
		.flags = PP_FLAG_DMA_MAP | PP_FLAG_DMA_SYNC_DEV |
			 PP_FLAG_ALLOW_UNREADABLE_NETMEM,
	};

	return page_pool_create(&p);
}

static int dmsim_open(struct net_device *dev)
{
	struct dmsim *ds = netdev_priv(dev);
	struct page_pool *pp;
	int i;

	for (i = 0; i < NQ; i++) {
		struct netdev_queue_config qc = {};
		struct dmsim_rxq *q = &ds->rxq[i];

		if (queue_ops)
			netdev_queue_config(dev, i, &qc);
		q->psize = qc.rx_page_size ?: PAGE_SIZE;
		netif_napi_add_config_locked(dev, &q->napi, dmsim_poll, i);
		pp = mkpool(ds, i, q->psize);
		if (IS_ERR(pp)) {
			__netif_napi_del_locked(&q->napi);
			while (--i >= 0) {
				napi_disable_locked(&ds->rxq[i].napi);
				__netif_napi_del_locked(&ds->rxq[i].napi);
				page_pool_destroy(ds->rxq[i].pp);
			}
			synchronize_net();
			return PTR_ERR(pp);
		}
		q->pp = pp;
		netif_queue_set_napi(dev, i, NETDEV_QUEUE_TYPE_RX, &q->napi);
		netif_queue_set_napi(dev, i, NETDEV_QUEUE_TYPE_TX, &q->napi);
		napi_enable_locked(&q->napi);
	}
	netif_carrier_on(dev);
	netif_tx_start_all_queues(dev);
	return 0;
}

static int dmsim_stop(struct net_device *dev)
{
	struct dmsim *ds = netdev_priv(dev);
	int i;

	netif_tx_stop_all_queues(dev);
	netif_carrier_off(dev);
	for (i = 0; i < NQ; i++) {
		netif_queue_set_napi(dev, i, NETDEV_QUEUE_TYPE_RX, NULL);
		netif_queue_set_napi(dev, i, NETDEV_QUEUE_TYPE_TX, NULL);
		napi_disable_locked(&ds->rxq[i].napi);
		__netif_napi_del_locked(&ds->rxq[i].napi);
	}
	synchronize_net();
	for (i = 0; i < NQ; i++) {
		skb_queue_purge(&ds->rxq[i].in);
		page_pool_destroy(ds->rxq[i].pp);
		ds->rxq[i].pp = NULL;
	}
	return 0;
}

/* ---- queue management: what makes bind-rx possible ---- */
struct dmsim_qmem { struct page_pool *pp; u32 psize; };

static int q_alloc(struct net_device *dev, struct netdev_queue_config *qc,
		   void *mem, int idx)
{
	struct dmsim *ds = netdev_priv(dev);
	struct dmsim_qmem *m = mem;
	struct page_pool *pp;

	m->psize = qc->rx_page_size ?: PAGE_SIZE;
	pp = mkpool(ds, idx, m->psize);
	if (IS_ERR(pp))
		return PTR_ERR(pp);
	m->pp = pp;
	return 0;
}

static void q_free(struct net_device *dev, void *mem)
{
	struct dmsim_qmem *m = mem;

	if (m->pp)
		page_pool_destroy(m->pp);
}

static int q_start(struct net_device *dev, struct netdev_queue_config *qc,
		   void *mem, int idx)
{
	struct dmsim *ds = netdev_priv(dev);
	struct dmsim_qmem *m = mem;

	ds->rxq[idx].pp = m->pp;
	ds->rxq[idx].psize = m->psize;
	m->pp = NULL;
	napi_enable_locked(&ds->rxq[idx].napi);
	local_bh_disable();
	napi_schedule(&ds->rxq[idx].napi);
	local_bh_enable();
	return 0;
}

static int q_stop(struct net_device *dev, void *mem, int idx)
{
	struct dmsim *ds = netdev_priv(dev);
	struct dmsim_qmem *m = mem;

	napi_disable_locked(&ds->rxq[idx].napi);
	m->pp = ds->rxq[idx].pp;
	m->psize = ds->rxq[idx].psize;
	page_pool_disable_direct_recycling(m->pp);
	return 0;
}

static void q_default(struct net_device *dev, struct netdev_queue_config *qc)
{
	qc->rx_page_size = PAGE_SIZE;
}

static int q_validate(struct net_device *dev, struct netdev_queue_config *qc,
		      struct netlink_ext_ack *extack)
{
	if (qc->rx_page_size < PAGE_SIZE || qc->rx_page_size > SZ_64K)
		return -EINVAL;
	return 0;
}

static struct device *q_dma_dev(struct net_device *dev, int idx)
{
	return dma ? ((struct dmsim *)netdev_priv(dev))->dma_dev : NULL;
}

static const struct netdev_queue_mgmt_ops qops = {
	.ndo_queue_mem_size	= sizeof(struct dmsim_qmem),
	.ndo_queue_mem_alloc	= q_alloc,
	.ndo_queue_mem_free	= q_free,
	.ndo_queue_start	= q_start,
	.ndo_queue_stop		= q_stop,
	.ndo_default_qcfg	= q_default,
	.ndo_validate_qcfg	= q_validate,
	.ndo_queue_get_dma_dev	= q_dma_dev,
	.supported_params	= QCFG_RX_PAGE_SIZE,
};

static const struct net_device_ops nops = {
	.ndo_open		= dmsim_open,
	.ndo_stop		= dmsim_stop,
	.ndo_start_xmit		= dmsim_xmit,
	.ndo_set_mac_address	= eth_mac_addr,
	.ndo_validate_addr	= eth_validate_addr,
};

/* ---- ethtool ---- */
static void get_ring(struct net_device *dev, struct ethtool_ringparam *r,
		     struct kernel_ethtool_ringparam *k,
		     struct netlink_ext_ack *extack)
{
	r->rx_pending = r->rx_max_pending = QLEN;
	r->tx_pending = r->tx_max_pending = QLEN;
	k->hds_thresh_max = 1024;
	if (dev->cfg->hds_config == ETHTOOL_TCP_DATA_SPLIT_UNKNOWN)
		k->tcp_data_split = ETHTOOL_TCP_DATA_SPLIT_DISABLED;
}

static int set_ring(struct net_device *dev, struct ethtool_ringparam *r,
		    struct kernel_ethtool_ringparam *k,
		    struct netlink_ext_ack *extack)
{
	return 0;
}

static void get_chan(struct net_device *dev, struct ethtool_channels *c)
{
	c->max_combined = c->combined_count = NQ;
}

static int set_chan(struct net_device *dev, struct ethtool_channels *c)
{
	return c->combined_count == NQ ? 0 : -EINVAL;
}

static u32 ring_count(struct net_device *dev)
{
	return NQ;
}

static int get_rxnfc(struct net_device *dev, struct ethtool_rxnfc *c, u32 *locs)
{
	struct dmsim *ds = netdev_priv(dev);
	int i, n = 0;

	switch (c->cmd) {
	case ETHTOOL_GRXCLSRLCNT:
		for (i = 0; i < NRULES; i++)
			n += ds->rule[i].used;
		c->rule_cnt = n;
		c->data = NRULES | RX_CLS_LOC_SPECIAL;
		return 0;
	case ETHTOOL_GRXCLSRULE:
		if (c->fs.location >= NRULES || !ds->rule[c->fs.location].used)
			return -ENOENT;
		c->fs = ds->rule[c->fs.location].fs;
		return 0;
	case ETHTOOL_GRXCLSRLALL:
		for (i = 0; i < NRULES; i++) {
			if (!ds->rule[i].used)
				continue;
			if (n == c->rule_cnt)
				return -EMSGSIZE;
			locs[n++] = i;
		}
		c->rule_cnt = n;
		c->data = NRULES;
		return 0;
	}
	return -EOPNOTSUPP;
}

static int set_rxnfc(struct net_device *dev, struct ethtool_rxnfc *c)
{
	struct dmsim *ds = netdev_priv(dev);
	u32 l = c->fs.location;

	switch (c->cmd) {
	case ETHTOOL_SRXCLSRLINS:
		if (c->fs.flow_type != TCP_V4_FLOW)
			return -EOPNOTSUPP;
		if (c->fs.ring_cookie >= NQ)
			return -EINVAL;
		if (l & RX_CLS_LOC_SPECIAL)
			for (l = 0; l < NRULES && ds->rule[l].used; l++)
				;
		if (l >= NRULES)
			return -ENOSPC;
		c->fs.location = l;
		ds->rule[l].fs = c->fs;
		smp_store_release(&ds->rule[l].used, true);
		return 0;
	case ETHTOOL_SRXCLSRLDEL:
		if (l >= NRULES || !ds->rule[l].used)
			return -ENOENT;
		ds->rule[l].used = false;
		return 0;
	}
	return -EOPNOTSUPP;
}

static u32 indir_size(struct net_device *dev)
{
	return INDIR;
}

static u32 key_size(struct net_device *dev)
{
	return 40;
}

static int get_rxfh(struct net_device *dev, struct ethtool_rxfh_param *p)
{
	struct dmsim *ds = netdev_priv(dev);

	p->hfunc = ETH_RSS_HASH_TOP;
	if (p->indir)
		memcpy(p->indir, ds->indir, sizeof(ds->indir));
	if (p->key)
		memcpy(p->key, ds->key, sizeof(ds->key));
	return 0;
}

static int set_rxfh(struct net_device *dev, struct ethtool_rxfh_param *p,
		    struct netlink_ext_ack *extack)
{
	struct dmsim *ds = netdev_priv(dev);

	if (p->indir)
		memcpy(ds->indir, p->indir, sizeof(ds->indir));
	if (p->key)
		memcpy(ds->key, p->key, sizeof(ds->key));
	return 0;
}

static const char stat_names[][ETH_GSTRING_LEN] = {
	"q0_devmem_frags", "q1_devmem_frags", "q2_devmem_frags",
	"q3_devmem_frags", "q0_nobufs", "q1_nobufs", "q2_nobufs", "q3_nobufs",
	/* both of all queues; how a test knows that it met what it is about */
	"devmem_frags", "nobufs",
	/* fragments that do not begin their page */
	"packed",
	/* packets with payload beside the pool */
	"unsplit",
	/* packets of more than 1,500 bytes whose payload went to pages */
	"large",
	/* packets lost by drop_every */
	"lost",
	/* fragments sent out of device memory */
	"sent_devmem",
	/* tcp-data-split as it was set: 0 auto, 1 off, 2 on; ethtool says what it is */
	"split_setting",
};

static int sset_count(struct net_device *dev, int s)
{
	return s == ETH_SS_STATS ? ARRAY_SIZE(stat_names) : -EOPNOTSUPP;
}

static void get_strings(struct net_device *dev, u32 s, u8 *data)
{
	if (s == ETH_SS_STATS)
		memcpy(data, stat_names, sizeof(stat_names));
}

static void get_stats(struct net_device *dev, struct ethtool_stats *st, u64 *d)
{
	struct dmsim *ds = netdev_priv(dev);
	u64 *sum = d + 2 * NQ;
	int i;

	memset(d, 0, ARRAY_SIZE(stat_names) * sizeof(*d));
	for (i = 0; i < NQ; i++) {
		struct dmsim_rxq *q = &ds->rxq[i];

		d[i] = q->devmem_frags;
		d[NQ + i] = q->nobufs;
		sum[0] += q->devmem_frags;
		sum[1] += q->nobufs;
		sum[2] += q->packed;
		sum[3] += q->unsplit;
		sum[4] += q->large;
	}
	sum[5] = atomic64_read(&ds->lost);
	sum[6] = atomic64_read(&ds->sent_devmem);
	sum[7] = dev->cfg->hds_config;
}

static void get_drvinfo(struct net_device *dev, struct ethtool_drvinfo *info)
{
	strscpy(info->driver, "dmsim", sizeof(info->driver));
}

static const struct ethtool_ops eops = {
	.get_drvinfo		= get_drvinfo,
	.supported_ring_params	= ETHTOOL_RING_USE_TCP_DATA_SPLIT |
				  ETHTOOL_RING_USE_HDS_THRS,
	.get_link		= ethtool_op_get_link,
	.get_ringparam		= get_ring,
	.set_ringparam		= set_ring,
	.get_channels		= get_chan,
	.set_channels		= set_chan,
	.get_rx_ring_count	= ring_count,
	.get_rxnfc		= get_rxnfc,
	.set_rxnfc		= set_rxnfc,
	.get_rxfh_indir_size	= indir_size,
	.get_rxfh_key_size	= key_size,
	.get_rxfh		= get_rxfh,
	.set_rxfh		= set_rxfh,
	.get_sset_count		= sset_count,
	.get_strings		= get_strings,
	.get_ethtool_stats	= get_stats,
};

static int mkdev(int n)
{
	struct net_device *dev;
	struct dmsim *ds;
	int i, err;

	pdev[n] = platform_device_register_simple("dmsim", n, NULL, 0);
	if (IS_ERR(pdev[n]))
		return PTR_ERR(pdev[n]);
	err = dma_coerce_mask_and_coherent(&pdev[n]->dev, DMA_BIT_MASK(64));
	if (err)
		goto out_pdev;
	dev = alloc_etherdev_mqs(sizeof(*ds), NQ, NQ);
	if (!dev) {
		err = -ENOMEM;
		goto out_pdev;
	}
	SET_NETDEV_DEV(dev, &pdev[n]->dev);
	snprintf(dev->name, IFNAMSIZ, "dm%d", n);
	ds = netdev_priv(dev);
	ds->dev = dev;
	ds->dma_dev = &pdev[n]->dev;
	for (i = 0; i < NQ; i++)
		skb_queue_head_init(&ds->rxq[i].in);
	for (i = 0; i < INDIR; i++)
		ds->indir[i] = i % NQ;
	dev->netdev_ops = &nops;
	dev->ethtool_ops = &eops;
	if (queue_ops)
		dev->queue_mgmt_ops = &qops;
	if (send)
		dev->netmem_tx = NETMEM_TX_DMA;
	dev->pcpu_stat_type = NETDEV_PCPU_STAT_DSTATS;
	dev->features |= NETIF_F_SG | NETIF_F_HW_CSUM | NETIF_F_HIGHDMA |
			 NETIF_F_RXCSUM | NETIF_F_NTUPLE;
	dev->hw_features |= dev->features | NETIF_F_TSO | NETIF_F_TSO6;
	dev->max_mtu = 9000;
	eth_hw_addr_random(dev);
	netif_carrier_off(dev);
	err = register_netdev(dev);
	if (err) {
		free_netdev(dev);
		goto out_pdev;
	}
	pair[n] = ds;
	return 0;
out_pdev:
	platform_device_unregister(pdev[n]);
	return err;
}

static void rmdev(int n)
{
	struct net_device *dev = pair[n]->dev;

	unregister_netdev(dev);
	free_netdev(dev);
	platform_device_unregister(pdev[n]);
}

static int __init dmsim_init(void)
{
	int err = mkdev(0);

	if (err)
		return err;
	err = mkdev(1);
	if (err) {
		rmdev(0);
		return err;
	}
	pair[0]->peer = pair[1];
	pair[1]->peer = pair[0];
	return 0;
}

static void __exit dmsim_exit(void)
{
	WRITE_ONCE(pair[0]->peer, NULL);
	WRITE_ONCE(pair[1]->peer, NULL);
	synchronize_net();
	rmdev(1);
	rmdev(0);
}

module_init(dmsim_init);
module_exit(dmsim_exit);
MODULE_DESCRIPTION("devmem TCP test pair");
MODULE_LICENSE("GPL");
