//! A file system in memory that forgets what was not synced, and breaks when told to.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use tessera_cache::log::files::{Access, Files, LogFile};
use tessera_cache::{ColdRows, Planes, PlanesMut, RowLayout};

/// A generator of test data (splitmix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
}

/// Bytes of one file: as programs see them, and as they were at the last sync.
#[derive(Clone, Debug, Default)]
struct Contents {
    now: Vec<u8>,
    synced: Vec<u8>,
}

#[derive(Debug, Default)]
struct World {
    names: BTreeMap<PathBuf, usize>,
    synced_names: BTreeMap<PathBuf, usize>,
    files: Vec<Contents>,
    locked: BTreeSet<PathBuf>,
    /// Changes so far: each is a point at which a machine may stop.
    steps: u64,
    stop_at: Option<u64>,
    stopped: bool,
    /// The sync at this step, or the first after it, fails.
    fail_sync_from: Option<u64>,
    /// Bytes that writes may still add.
    room: Option<u64>,
    /// Reads and writes do a part of what is asked.
    short: Option<Random>,
    links: bool,
}

/// The simulated disk; clones are handles to the same one.
#[derive(Clone, Debug, Default)]
pub struct Sim(Arc<Mutex<World>>);

/// What of the changes that were not synced survives.
#[derive(Clone, Copy, Debug)]
pub enum Loss {
    /// All of them are lost.
    All,
    /// None: the process died, not the machine.
    Nothing,
    /// Of each file a prefix of its new bytes; of each name the old or the new file.
    Suffixes,
    /// Of each file any of its 512-byte sectors; of each name the old or the new file.
    Sectors,
}

pub const LOSSES: [Loss; 4] = [Loss::All, Loss::Nothing, Loss::Suffixes, Loss::Sectors];

impl Sim {
    pub fn new() -> Self {
        let sim = Self::default();
        sim.world().links = true;
        sim
    }

    fn world(&self) -> std::sync::MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    pub fn steps(&self) -> u64 {
        self.world().steps
    }

    /// The machine stops in the middle of the `n`-th change from now.
    pub fn stop_after(&self, n: u64) {
        let mut world = self.world();
        world.stop_at = Some(world.steps + n);
    }

    pub fn stopped(&self) -> bool {
        self.world().stopped
    }

    pub fn fail_next_sync(&self) {
        let mut world = self.world();
        world.fail_sync_from = Some(world.steps);
    }

    /// Writes may add `room` bytes more.
    pub fn set_room(&self, room: u64) {
        self.world().room = Some(room);
    }

    pub fn short_transfers(&self, seed: u64) {
        self.world().short = Some(Random(seed));
    }

    pub fn forbid_links(&self) {
        self.world().links = false;
    }

    pub fn names(&self, dir: &Path) -> Vec<String> {
        self.list(dir).unwrap()
    }

    pub fn bytes(&self, path: &Path) -> Vec<u8> {
        let world = self.world();
        world.files[world.names[path]].now.clone()
    }

    pub fn flip(&self, path: &Path, bit: u64) {
        let mut world = self.world();
        let file = world.names[path];
        let contents = &mut world.files[file];
        for bytes in [&mut contents.now, &mut contents.synced] {
            if let Some(byte) = bytes.get_mut((bit / 8) as usize) {
                *byte ^= 1 << (bit % 8);
            }
        }
    }

    pub fn cut(&self, path: &Path, bytes: u64) {
        let mut world = self.world();
        let file = world.names[path];
        let contents = &mut world.files[file];
        contents.now.truncate(bytes as usize);
        contents.synced.truncate(bytes as usize);
    }

    pub fn delete(&self, path: &Path) {
        let mut world = self.world();
        world.names.remove(path);
        world.synced_names.remove(path);
    }

    pub fn copy_name(&self, from: &Path, to: &Path) {
        let mut world = self.world();
        let contents = world.files[world.names[from]].clone();
        world.files.push(contents);
        let file = world.files.len() - 1;
        world.names.insert(to.to_owned(), file);
        world.synced_names.insert(to.to_owned(), file);
    }

    /// Another disk with what is left after the machine stopped here and now.
    pub fn reboot(&self, loss: Loss, seed: u64) -> Self {
        let random = &mut Random(seed);
        let world = self.world();
        let files: Vec<Contents> =
            world.files.iter().map(|contents| survive(contents, loss, random)).collect();
        let paths: BTreeSet<&PathBuf> =
            world.names.keys().chain(world.synced_names.keys()).collect();
        let names: BTreeMap<PathBuf, usize> = paths
            .into_iter()
            .filter_map(|path| {
                let new = match loss {
                    Loss::All => false,
                    Loss::Nothing => true,
                    Loss::Suffixes | Loss::Sectors => random.below(2) == 0,
                };
                let names = if new { &world.names } else { &world.synced_names };
                names.get(path).map(|&file| (path.clone(), file))
            })
            .collect();
        let world = World { synced_names: names.clone(), names, files, ..World::default() };
        let sim = Self(Arc::new(Mutex::new(world)));
        sim.world().links = true;
        sim
    }
}

fn survive(contents: &Contents, loss: Loss, random: &mut Random) -> Contents {
    let (now, synced) = (&contents.now, &contents.synced);
    let mut left = match loss {
        Loss::All => synced.clone(),
        Loss::Nothing => now.clone(),
        Loss::Suffixes => {
            let same = now.iter().zip(synced).take_while(|(a, b)| a == b).count();
            let cut = same + random.below((now.len() - same) as u64 + 1) as usize;
            let mut left = now[..cut].to_vec();
            left.extend_from_slice(synced.get(cut..).unwrap_or_default());
            left
        }
        Loss::Sectors => {
            let (short, long) = (now.len().min(synced.len()), now.len().max(synced.len()));
            let between = short + random.below((long - short) as u64 + 1) as usize;
            // The whole length most of the time: what comes last can only survive then.
            let length = [short, between, long, long][random.below(4) as usize];
            let mut left = vec![0; length];
            for (sector, bytes) in left.chunks_mut(512).enumerate() {
                let from = if random.below(2) == 0 { now } else { synced };
                let from = from.get(sector * 512..).unwrap_or_default();
                let count = from.len().min(bytes.len());
                bytes[..count].copy_from_slice(&from[..count]);
            }
            left
        }
    };
    left.shrink_to_fit();
    Contents { now: left.clone(), synced: left }
}

fn stop() -> io::Error {
    io::Error::other("the machine stopped")
}

impl World {
    /// Counts a change; says whether the machine stops in it.
    fn step(&mut self) -> io::Result<bool> {
        if self.stopped {
            return Err(stop());
        }
        self.steps += 1;
        self.stopped = self.stop_at == Some(self.steps);
        Ok(self.stopped)
    }

    /// A change that happens whole or not at all.
    fn change(&mut self, change: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        if self.step()? {
            return Err(stop());
        }
        change(self)
    }

    fn file(&self, path: &Path) -> io::Result<usize> {
        if self.stopped {
            return Err(stop());
        }
        self.names.get(path).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

#[derive(Debug)]
struct SimFile {
    sim: Sim,
    file: usize,
}

impl LogFile for SimFile {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut world = self.sim.world();
        if world.stopped {
            return Err(stop());
        }
        let most = match &mut world.short {
            Some(random) => 1 + random.below(bytes.len() as u64) as usize,
            None => bytes.len(),
        };
        let from = world.files[self.file].now.get(offset as usize..).unwrap_or_default();
        let count = most.min(bytes.len()).min(from.len());
        bytes[..count].copy_from_slice(&from[..count]);
        Ok(count)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let mut world = self.sim.world();
        let mut count = bytes.len();
        let stops = world.step()?;
        if let Some(random) = &mut world.short {
            count = 1 + random.below(count as u64) as usize;
        }
        if stops {
            count /= 2;
        }
        if let Some(room) = &mut world.room {
            count = count.min(*room as usize);
            *room -= count as u64;
            if count == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
        }
        let now = &mut world.files[self.file].now;
        let end = offset as usize + count;
        if now.len() < end {
            now.resize(end, 0);
        }
        now[offset as usize..end].copy_from_slice(&bytes[..count]);
        if stops { Err(stop()) } else { Ok(count) }
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.sim.world().files[self.file].now.len() as u64)
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        self.sim.world().change(|world| {
            world.files[self.file].now.resize(bytes as usize, 0);
            Ok(())
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.sim.world().change(|world| {
            if world.fail_sync_from.take().is_some() {
                return Err(io::Error::other("the sync failed on purpose"));
            }
            let contents = &mut world.files[self.file];
            contents.synced.clone_from(&contents.now);
            Ok(())
        })
    }
}

#[derive(Debug)]
struct Locked {
    sim: Sim,
    dir: PathBuf,
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.sim.world().locked.remove(&self.dir);
    }
}

impl Files for Sim {
    fn create_dir(&self, _dir: &Path) -> io::Result<()> {
        Ok(())
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let world = self.world();
        if world.stopped {
            return Err(stop());
        }
        let inside = world.names.keys().filter(|path| path.parent() == Some(dir));
        Ok(inside.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect())
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn LogFile>> {
        let mut file = 0;
        self.world().change(|world| {
            if world.names.contains_key(path) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            file = world.files.len();
            world.files.push(Contents::default());
            world.names.insert(path.to_owned(), file);
            Ok(())
        })?;
        Ok(Box::new(SimFile { sim: self.clone(), file }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn LogFile>> {
        let file = self.world().file(path)?;
        Ok(Box::new(SimFile { sim: self.clone(), file }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.world().change(|world| {
            let file = world.file(from)?;
            world.names.remove(from);
            world.names.insert(to.to_owned(), file);
            Ok(())
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.world().change(|world| {
            world.file(path)?;
            world.names.remove(path);
            Ok(())
        })
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.world().change(|world| {
            let file = world.file(from)?;
            if !world.links {
                return Err(io::ErrorKind::CrossesDevices.into());
            }
            if world.names.contains_key(to) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            world.names.insert(to.to_owned(), file);
            Ok(())
        })
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.world().change(|world| {
            let inside = |path: &PathBuf| path.parent() == Some(dir);
            world.synced_names.retain(|path, _| !inside(path));
            let now = world.names.iter().filter(|(path, _)| inside(path));
            world.synced_names.extend(now.map(|(path, &file)| (path.clone(), file)));
            Ok(())
        })
    }

    fn lock(&self, dir: &Path) -> io::Result<Box<dyn std::fmt::Debug + Send + Sync>> {
        if !self.world().locked.insert(dir.to_owned()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Box::new(Locked { sim: self.clone(), dir: dir.to_owned() }))
    }

    fn os_file(&self, _path: &Path, _access: Access) -> io::Result<Option<File>> {
        Ok(None)
    }
}

/// Bytes of a row's planes as of its `n`-th writing.
pub fn row_bytes(layout: RowLayout, row: u64, n: u64) -> (Vec<u8>, Vec<u8>) {
    let mut random = Random(row.wrapping_mul(0x1234_5679) ^ n << 32);
    let mut bytes = |count| (0..count).map(|_| random.next() as u8).collect();
    (bytes(layout.weight_bytes), bytes(layout.state_bytes))
}

/// What a log should hold: row -> number of the writing.
pub type Model = HashMap<u64, u64>;

/// Puts rows as of their `n`-th writing.
pub fn put(log: &dyn ColdRows, rows: &[u64], n: u64) -> tessera_cache::Result<()> {
    let (mut weights, mut state) = (Vec::new(), Vec::new());
    for &row in rows {
        let planes = row_bytes(log.layout(), row, n);
        weights.extend(planes.0);
        state.extend(planes.1);
    }
    log.put(rows, Planes { weights: &weights, state: &state })
}

/// Planes of rows, or `None` for those that are not there.
pub type Got = Vec<Option<(Vec<u8>, Vec<u8>)>>;

/// Gets rows into planes full of 0xA5, which absent rows must leave as they are.
pub fn get(log: &dyn ColdRows, rows: &[u64]) -> tessera_cache::Result<Got> {
    let layout = log.layout();
    let mut weights = vec![0xA5; rows.len() * layout.weight_bytes];
    let mut state = vec![0xA5; rows.len() * layout.state_bytes];
    let mut found = vec![false; rows.len()];
    log.get(rows, PlanesMut { weights: &mut weights, state: &mut state }, &mut found)?;
    let mut there = vec![false; rows.len()];
    log.contains(rows, &mut there);
    assert_eq!(found, there);
    let got = found.iter().enumerate().map(|(i, &found)| {
        let weights = &weights[i * layout.weight_bytes..][..layout.weight_bytes];
        let state = &state[i * layout.state_bytes..][..layout.state_bytes];
        if !found {
            assert!(weights.iter().chain(state).all(|&byte| byte == 0xA5));
        }
        found.then(|| (weights.to_vec(), state.to_vec()))
    });
    Ok(got.collect())
}

/// The log holds exactly the model's rows among 0..rows.
pub fn check(log: &dyn ColdRows, model: &Model, rows: u64) {
    let all: Vec<u64> = (0..rows).rev().collect();
    let got = get(log, &all).unwrap();
    for (&row, got) in all.iter().zip(got) {
        let expected = model.get(&row).map(|&n| row_bytes(log.layout(), row, n));
        assert!(got == expected, "row {row}: writing {:?} expected", model.get(&row));
    }
    assert_eq!(log.len(), model.len() as u64);
    assert_eq!(log.stats().rows, log.len());
}
