use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);

/// What a connection meets with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Road {
    /// Its peer answers at once.
    Open,
    /// It is refused at once.
    Refused,
    /// This side does not dial.
    Theirs,
    /// Nobody answers.
    Silent,
}

#[derive(Debug)]
struct Fake {
    road: Road,
    until: Instant,
}

impl Attempt for Fake {
    type Link = Instant;
    type Error = ();

    fn poll(&mut self, now: Instant) -> Result<Option<Instant>, ()> {
        match self.road {
            Road::Open => Ok(Some(now)),
            Road::Silent if now < self.until => Ok(None),
            Road::Refused | Road::Silent | Road::Theirs => Err(()),
        }
    }
}

/// Places, the roads to them, and what was done with each.
struct World {
    places: Vec<DialState>,
    roads: Vec<Road>,
    dials: Vec<Vec<Instant>>,
    now: Instant,
    redial: Redial<Fake>,
    /// Whether a first look at a connection that was filled finds it broken.
    refuses_fill: bool,
}

impl World {
    fn new(places: &[DialState], road: Road) -> Self {
        Self {
            places: places.to_vec(),
            roads: vec![road; places.len()],
            dials: vec![Vec::new(); places.len()],
            now: Instant::now(),
            redial: Redial::default(),
            refuses_fill: false,
        }
    }

    fn advance(&mut self) -> Option<Duration> {
        let Self {
            places,
            roads,
            dials,
            redial,
            now,
            refuses_fill,
        } = self;
        let news = redial.advance(*now, places, |lane| {
            let lane = usize::from(lane);
            assert!(matches!(
                places[lane],
                DialState::Vacant | DialState::Doubtful
            ));
            if roads[lane] == Road::Theirs {
                return None;
            }
            dials[lane].push(*now);
            Some(Fake {
                road: roads[lane],
                until: *now + ATTEMPT,
            })
        });
        for one in news {
            match one {
                News::Vacate(lane) => {
                    assert_eq!(places[usize::from(lane)], DialState::Doubtful);
                    places[usize::from(lane)] = DialState::Leaving;
                }
                News::Fill(lane, _) if *refuses_fill => redial.broke(lane),
                News::Fill(lane, _) => {
                    let place = &mut places[usize::from(lane)];
                    assert!(matches!(place, DialState::Vacant | DialState::Unwanted));
                    *place = DialState::Filled;
                }
                News::Failed(..) => {}
            }
        }
        let is_wanted = |place| {
            matches!(
                place,
                DialState::Vacant | DialState::Doubtful | DialState::Leaving
            )
        };
        let wants = places.iter().any(|place| is_wanted(*place));
        (wants || !redial.is_idle()).then(|| redial.next(*now))
    }

    /// Advances it whenever it wants that, for so long.
    fn run(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            let next = self.advance().unwrap_or(TICK);
            self.now += next.max(MS);
        }
    }

    /// The pauses between dials of a place.
    fn pauses(&self, lane: usize) -> Vec<u128> {
        let dials = self.dials[lane].windows(2);
        dials.map(|two| (two[1] - two[0]).as_millis()).collect()
    }
}

#[test]
fn a_broken_lane_is_redialled_after_growing_pauses() {
    let mut world = World::new(&[DialState::Filled, DialState::Vacant], Road::Refused);
    world.run(Duration::from_secs(60));
    let pauses = world.pauses(1);
    assert_eq!(pauses[..5], [20, 40, 80, 160, 320]);
    assert_eq!(pauses.last(), Some(&10_000));
    assert!(world.dials[0].is_empty());
    world.roads[1] = Road::Open;
    world.run(LONGEST_PAUSE);
    assert_eq!(world.places, [DialState::Filled; 2]);
    // The next time it is as at first.
    world.dials[1].clear();
    world.places[1] = DialState::Vacant;
    world.roads[1] = Road::Refused;
    world.run(Duration::from_secs(1));
    assert_eq!(world.pauses(1)[..3], [20, 40, 80]);
}

#[test]
fn without_live_lanes_none_waits_long() {
    let mut world = World::new(&[DialState::Filled, DialState::Vacant], Road::Silent);
    world.run(Duration::from_secs(600));
    world.places[0] = DialState::Vacant;
    world.run(Duration::from_secs(3600));
    let bare = world.redial.bare(world.now).unwrap();
    assert!(bare > Duration::from_secs(3590), "{bare:?}");
    world.roads.fill(Road::Open);
    world.run(ATTEMPT + LONGEST_BARE_PAUSE + TICK);
    assert_eq!(world.places, [DialState::Filled; 2]);
    world.advance();
    assert_eq!(world.redial.bare(world.now), None);
}

#[test]
fn a_refused_lane_waits_for_the_rounds_end() {
    let mut world = World::new(&[DialState::Vacant; 2], Road::Silent);
    world.roads[1] = Road::Refused;
    world.run(ATTEMPT - STEP);
    assert_eq!([world.dials[0].len(), world.dials[1].len()], [1, 1]);
    world.run(ATTEMPT);
    assert_eq!(world.dials[1].len(), 2);
}

#[test]
fn a_doubtful_connection_stays_until_another_has_come_about() {
    let mut world = World::new(&[DialState::Doubtful], Road::Silent);
    // The peer may rest for as long as it likes.
    world.run(Duration::from_secs(3600));
    assert_eq!(world.places, [DialState::Doubtful]);
    assert_eq!(world.redial.bare(world.now), None);
    // It moves again: nothing is dialled any more.
    world.places[0] = DialState::Filled;
    world.roads[0] = Road::Open;
    world.dials[0].clear();
    world.run(Duration::from_secs(1));
    assert!(world.dials[0].is_empty());
    world.places[0] = DialState::Doubtful;
    world.advance();
    assert_eq!(world.places, [DialState::Leaving]);
    // The other one waits until that is gone.
    world.run(Duration::from_secs(1));
    assert_eq!(world.places, [DialState::Leaving]);
    world.places[0] = DialState::Vacant;
    world.advance();
    assert_eq!(world.places, [DialState::Filled]);
    assert_eq!(world.dials[0].len(), 1);
}

#[test]
fn what_breaks_before_it_is_used_is_dialled_after_a_pause() {
    let mut world = World::new(&[DialState::Vacant], Road::Open);
    world.refuses_fill = true;
    world.run(Duration::from_secs(10));
    let longest = LONGEST_BARE_PAUSE.as_millis();
    assert_eq!(world.pauses(0).last(), Some(&longest));
    world.refuses_fill = false;
    world.run(LONGEST_BARE_PAUSE + TICK);
    assert_eq!(world.places, [DialState::Filled]);
}

#[test]
fn a_peers_dial_takes_the_place_of_ours() {
    let mut world = World::new(&[DialState::Vacant, DialState::Unwanted], Road::Silent);
    world.advance();
    for lane in [0, 1] {
        world.redial.came(lane, world.now);
    }
    assert_eq!(world.redial.coming(), 3);
    world.advance();
    assert_eq!(world.places, [DialState::Filled; 2]);
    assert_eq!(world.redial.coming(), 0);
}

#[test]
fn a_failed_lane_is_redialled_after_a_forgotten_attempt() {
    let mut world = World::new(&[DialState::Doubtful, DialState::Vacant], Road::Silent);
    world.roads[1] = Road::Refused;
    world.advance();
    // It moves again.
    world.places[0] = DialState::Filled;
    world.roads[1] = Road::Open;
    world.run(LONGEST_PAUSE);
    assert_eq!(world.places, [DialState::Filled; 2]);
}

#[test]
fn a_side_that_does_not_dial_looks_now_and_then() {
    let mut world = World::new(&[DialState::Filled, DialState::Vacant], Road::Theirs);
    for _ in 0..100 {
        assert_eq!(world.advance(), Some(TICK));
        world.now += TICK;
    }
    world.places[1] = DialState::Filled;
    assert_eq!(world.advance(), None);
}

#[test]
fn time_at_rest_is_no_time_without_connections() {
    let mut world = World::new(&[DialState::Vacant], Road::Silent);
    world.run(Duration::from_secs(1));
    world.now += 100 * REST;
    world.advance();
    assert_eq!(world.redial.bare(world.now), Some(Duration::ZERO));
    world.run(Duration::from_secs(1));
    assert!(world.redial.bare(world.now).unwrap() >= Duration::from_secs(1));
}

#[test]
fn connections_that_soon_break_again_are_no_time_without_any() {
    let mut world = World::new(&[DialState::Vacant], Road::Open);
    for _ in 0..1000 {
        world.run(REST / 5);
        assert_eq!(world.places, [DialState::Filled]);
        world.places[0] = DialState::Vacant;
        world.advance();
        let bare = world.redial.bare(world.now);
        assert!(bare.is_none_or(|bare| bare < REST), "{bare:?}");
    }
}

proptest! {
    /// The places say themselves what must not be done with them.
    #[test]
    fn all_lanes_are_back_soon_after_the_last_break(
        steps in prop::collection::vec((0usize..3, 0u8..8, 0u64..3000), 1..60),
    ) {
        let mut world = World::new(&[DialState::Vacant; 3], Road::Open);
        for (lane, what, millis) in steps {
            let place = &mut world.places[lane];
            match what {
                0 => world.roads[lane] = Road::Silent,
                1 => world.roads[lane] = Road::Refused,
                2 => world.roads[lane] = Road::Open,
                3 if *place == DialState::Filled => *place = DialState::Leaving,
                4 if *place == DialState::Leaving => *place = DialState::Vacant,
                5 if *place == DialState::Filled => *place = DialState::Doubtful,
                6 if *place == DialState::Doubtful => *place = DialState::Filled,
                7 => {
                    if matches!(place, DialState::Filled | DialState::Doubtful) {
                        *place = DialState::Leaving;
                    }
                    world.redial.came(lane as u16, world.now);
                }
                _ => {}
            }
            world.run(Duration::from_millis(millis));
        }
        world.roads.fill(Road::Open);
        for _ in 0..2 {
            for place in &mut world.places {
                if *place == DialState::Leaving {
                    *place = DialState::Vacant;
                }
            }
            world.run(LONGEST_PAUSE + ATTEMPT + TICK);
        }
        prop_assert_eq!(&world.places, &[DialState::Filled; 3]);
    }
}
