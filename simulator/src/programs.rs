//! The programs at both ends of each connection: their set-up, [what they do](actions) and [what
//! they check](checks).

mod actions;
mod checks;

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tcpx::{
    Auth, Connection, Endpoint, Lend, Limits, Local, Options, ProgressMode, Region, Rights,
    TcpNetwork, TcpOptions, Window, WindowKey,
};

use crate::liar::Liar;
use crate::plan::{Action, Plan, SLOT, SLOTS, Side};
use crate::system::{self, fail, note};
use actions::Program;
use checks::{GUARD, Model, SCRIBBLED, contents, guarded};
pub use checks::{all_closed, host, label};

pub const GOODBYE: Duration = Duration::from_secs(60);
/// Some times what bytes are on their way for at most.
const REVIVED: Duration = Duration::from_millis(50);

/// One connection, as both its programs see it.
struct Scene {
    number: usize,
    strict: bool,
    /// The other side is a liar.
    lied: bool,
    patience: Duration,
    queues: bool,
    /// Each side may read payload where the other one has it.
    is_local: bool,
    stall: Duration,
    looks: Duration,
    /// The side that closes while what it has started runs.
    closes: Option<usize>,
    /// It does.
    is_closing: AtomicBool,
    /// Those that have started everything.
    started: [AtomicBool; 2],
    model: Mutex<Model>,
    keys: Mutex<[Option<WindowKey>; 2]>,
    windows: [Region; 2],
    finished: Mutex<[bool; 2]>,
    ready: Barrier,
    done: Barrier,
}

pub fn options(plan: &Plan, key: &Auth, limits: Limits, manual: bool, encrypt: bool) -> Options {
    let network = TcpNetwork::new(TcpOptions {
        window: plan.window,
        stage_host: plan.stage,
        lend: Lend::Always,
        local: match plan.local {
            Some(_) => Local::On,
            None => Local::Off,
        },
        local_sizes: plan.local.unwrap_or_default(),
        turn_bytes: plan.turn_bytes,
        ..TcpOptions::default()
    });
    Options {
        channels: plan.lanes,
        chunk_bytes: Some(plan.chunk_bytes),
        eager_limit: plan.eager_limit,
        limits,
        bounds: plan.bounds,
        encrypt,
        progress: if manual {
            ProgressMode::Manual
        } else {
            ProgressMode::Background
        },
        ..Options::new(Arc::new(network), key.clone())
    }
}

fn program(
    scene: &Scene,
    side: usize,
    connection: Connection,
    plan: &Side,
    unbroken: bool,
) -> Vec<Region> {
    let region = &scene.windows[side];
    let slots = region.slice(GUARD..GUARD + SLOTS * SLOT);
    let slots = slots.unwrap_or_else(|error| fail(&error.to_string()));
    let window = match connection.expose(slots, Rights::GetAndPut) {
        Ok(window) => Some(window),
        Err(error) if scene.strict => fail(&format!("exposing failed: {error}")),
        // A liar may have ended the connection, or another connection's faults, which have begun.
        Err(_) => None,
    };
    let key = window.as_ref().map(Window::key);
    let mut keys = scene.keys.lock().unwrap_or_else(PoisonError::into_inner);
    if scene.lied {
        // As good as any.
        keys[1 - side].clone_from(&key);
    }
    keys[side] = key;
    drop(keys);
    scene.ready.wait();
    if side == 0 {
        system::begin_faults();
    }
    let mut program = Program {
        scene,
        side,
        connection: Some(connection),
        window,
        running: Vec::new(),
        left: Vec::new(),
        revoked: false,
        receives: 0,
    };
    program.run(plan);
    if !scene.lied {
        scene.set_done(side);
    }
    // What the peer still waits for comes only while this side collects notifications and, under
    // manual progress, drives the connection. What the peer has begun ends by its deadlines, one
    // behind the other where they wait for each other; a flood never does.
    let most = if scene.lied { 10 } else { 3600 };
    let pause = match plan.manual || scene.lied {
        true => scene.looks,
        false => Duration::from_millis(100),
    };
    let until = Instant::now() + Duration::from_secs(most);
    while program.connection.is_some() && !scene.is_done(1 - side) {
        if Instant::now() >= until {
            match scene.lied {
                true => break,
                false => fail("a program whose peer makes progress does not end"),
            }
        }
        program.check_running();
        std::thread::sleep(pause);
    }
    scene.done.wait();
    if side == 0 {
        // What a lane that was given up still has moves now, while its slots serve other chunks.
        system::heal();
        std::thread::sleep(REVIVED);
    }
    scene.done.wait();
    program.take_notifications();
    program.act(&Action::Revoke);
    if let Some(connection) = program.connection.take() {
        let outcome = connection.close(GOODBYE);
        note(|| format!("{}.{side} closed: {outcome:?}", scene.number));
        // A break at the last moment leaves one side without the other's goodbye.
        if let Err(error) = outcome
            && unbroken
        {
            program.may_fail(&error, "closing");
        }
    }
    scene.done.wait();
    if scene.lied {
        scene.set_done(side);
    }
    program.check_left();
    program.check_window(true);
    if side == 0 && scene.strict {
        scene.check_all();
    }
    program.left
}

/// What a client calls itself, so that its server knows it.
fn client_name(number: usize) -> String {
    format!("client {number}")
}

impl Scene {
    fn model(&self) -> std::sync::MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, side: usize) -> Option<WindowKey> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)[side]
    }

    fn is_done(&self, side: usize) -> bool {
        self.finished.lock().unwrap_or_else(PoisonError::into_inner)[side]
    }

    fn set_done(&self, side: usize) {
        self.finished.lock().unwrap_or_else(PoisonError::into_inner)[side] = true;
    }
}

/// Runs a plan; returns when everything of it has ended as it should.
pub fn run(plan: &Plan) {
    let key = tcpx::generate_key().unwrap_or_else(|error| fail(&error.to_string()));
    let auth = Auth::Key(key);
    let address: SocketAddr = match plan.near {
        true => ([127, 0, 0, 1], 0).into(),
        false => ([10, 0, 0, 1], 0).into(),
    };
    let mut pairs = Vec::new();
    let mut endpoints = Vec::new();
    let listen = |server: Options| {
        Endpoint::listen(address, server)
            .unwrap_or_else(|error| fail(&format!("listening failed: {error}")))
    };
    let liar = plan.liar.as_ref().and_then(|(side, manners)| {
        let server = options(plan, &auth, Limits::default(), side.manual, false);
        let endpoint = listen(server);
        let to = endpoint.local_addr();
        let (auth, manners) = (auth.clone(), manners.clone());
        let dialling = std::thread::spawn(move || Liar::connect(to, &auth, label(0), manners));
        let accepted = endpoint.accept(plan.patience);
        endpoints.push(endpoint);
        let Ok(dialled) = dialling.join() else {
            fail("the dialling thread panicked");
        };
        // Lanes beyond the agreed number may come before that is agreed.
        dialled.zip(accepted.ok())
    });
    let of_one = if plan.one_listener { usize::MAX } else { 1 };
    for group in plan.connections.chunks(of_one) {
        let [_, first] = &group[0];
        let server = options(plan, &auth, plan.limits[1], first.manual, plan.encrypt);
        let endpoint = listen(server);
        let to = endpoint.local_addr();
        let client = |[client, _]: &[Side; 2]| {
            options(plan, &auth, plan.limits[0], client.manual, plan.encrypt)
        };
        let clients: Vec<_> = group.iter().map(client).collect();
        // One after the other: they are accepted so, too.
        let dialling = std::thread::spawn(move || {
            let named = (0..).zip(clients).map(|(number, client)| Options {
                software: client_name(number),
                ..client
            });
            let dial = |client: Options| match Endpoint::connect(to, &client) {
                Ok(dialled) => dialled,
                Err(error) => fail(&format!("connecting failed: {error}")),
            };
            named.map(dial).collect::<Vec<_>>()
        });
        let accept = |number| match endpoint.accept(plan.patience) {
            Ok(accepted) if accepted.peer().software != client_name(number) => {
                fail("connections are accepted in another order than they were made")
            }
            Ok(accepted) => accepted,
            Err(error) => fail(&format!("accepting failed: {error}")),
        };
        let accepted: Vec<_> = (0..group.len()).map(accept).collect();
        let Ok(dialled) = dialling.join() else {
            fail("the dialling thread panicked");
        };
        pairs.extend(dialled.into_iter().zip(accepted));
        endpoints.push(endpoint);
    }
    let scene = |number: usize, lied: bool| {
        let programs = if lied { 1 } else { 2 };
        Scene {
            number,
            // What the other side has under way then may fail.
            strict: plan.strict && !lied && plan.closes.is_none(),
            lied,
            patience: plan.patience,
            queues: plan.queues && !lied,
            is_local: plan.local.is_some(),
            stall: plan.stall,
            looks: plan.looks,
            closes: plan.closes.filter(|_| !lied),
            is_closing: AtomicBool::new(false),
            started: Default::default(),
            model: Mutex::default(),
            keys: Mutex::default(),
            windows: [(); 2].map(|()| guarded(SLOTS * SLOT)),
            ready: Barrier::new(programs),
            done: Barrier::new(programs),
            finished: Mutex::default(),
        }
    };
    let lied = scene(0, true);
    let scenes: Vec<_> = (1..=plan.connections.len())
        .map(|number| scene(number, false))
        .collect();
    let left: Vec<Region> = std::thread::scope(|threads| {
        let mut running = Vec::new();
        let unbroken = plan.system.faults.is_empty();
        let mut start = |scene, side: usize, connection, actions| {
            running
                .push(threads.spawn(move || program(scene, side, connection, actions, unbroken)));
        };
        let all = scenes.iter().zip(&plan.connections).zip(pairs);
        for ((scene, [client, server]), (dialled, accepted)) in all {
            start(scene, 0, dialled, client);
            start(scene, 1, accepted, server);
        }
        if let (Some((side, _)), Some((liar, accepted))) = (&plan.liar, liar) {
            start(&lied, 1, accepted, side);
            let lied = &lied;
            threads.spawn(move || {
                liar.run(|| lied.key(1), || lied.is_done(1), || lied.set_done(0));
                lied.set_done(0);
            });
        }
        running
            .into_iter()
            .flat_map(|one| one.join().unwrap_or_else(|_| fail("a program panicked")))
            .collect()
    });
    system::end_faults();
    drop(endpoints);
    all_closed();
    for scene in &scenes {
        let model = scene.model();
        if let Some((_, tag)) = model.disordered.difference(&model.ended_early).next() {
            fail(&format!(
                "receives of tag {tag} got messages in another order than they were sent"
            ));
        }
    }
    for window in scenes.iter().chain([&lied]).flat_map(|one| &one.windows) {
        contents(window, "a window, after all connections were closed");
    }
    for region in &left {
        let bytes = contents(
            region,
            "memory of an operation, after all connections were closed",
        );
        if bytes.iter().any(|byte| *byte != SCRIBBLED) {
            fail("memory was written after its connection had ended");
        }
    }
}
