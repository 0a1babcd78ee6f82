//! `[table.admission]` and `[table.eviction]`: which ids of a dynamic table have a row.

use tessera_cache::{Admission, Eviction, SketchShape};
use tessera_embedding::TableKind;

use super::section::Section;

/// Most sightings that admission can ask for: a sketch counts up to here.
const SIGHTINGS_MAX: u64 = 255;

/// Ids that a sketch is made for, for each row of the table, unless the table says how many.
const SKETCH_IDS_PER_ROW: u64 = 4;

/// `kind` of a table of `rows` rows, with what belongs to it.
pub(super) fn kind(table: &mut Section<'_>, rows: u64, replicas: u64) -> TableKind {
    let is_dynamic = table.choice("kind", &[("static", false), ("dynamic", true)]);
    let (admission, eviction) = (table.section("admission"), table.section("eviction"));
    if !is_dynamic {
        for section in [admission, eviction] {
            section.finish(Some("a table of kind \"static\""));
        }
        return TableKind::Static;
    }
    if rows == 0 {
        table.fault("rows", "a dynamic table needs room for at least one id");
    }
    if replicas > 1 {
        table.fault(
            "kind",
            "\"dynamic\" goes with parallel.replicas = 1 only: groups see different ids, so their \
             tables would hold different ones",
        );
    }
    TableKind::Dynamic {
        admission: self::admission(admission, rows),
        eviction: self::eviction(eviction),
    }
}

fn admission(mut section: Section<'_>, rows: u64) -> Admission {
    #[derive(Clone, Copy)]
    enum Kind {
        Always,
        Count,
        Probability,
    }
    let kinds =
        [("always", Kind::Always), ("count", Kind::Count), ("probability", Kind::Probability)];
    let kind = section.choice("kind", &kinds);
    let admission = match kind {
        Kind::Always => Admission::Always,
        Kind::Count => {
            let n = section.or("n", 2u64);
            if !(1..=SIGHTINGS_MAX).contains(&n) {
                section.fault("n", format!("must be from 1 to {SIGHTINGS_MAX}, is {n}"));
            }
            let ids = section.at_least_one("sketch_ids", rows.saturating_mul(SKETCH_IDS_PER_ROW));
            let inside = |x: f64| x > 0.0 && x < 1.0;
            let delta = section.number("sketch_delta", 0.05, inside, "above 0 and below 1");
            let halve_every_sightings = section.or("halve_every", 0u64);
            Admission::Count {
                n: n.clamp(1, SIGHTINGS_MAX) as u8,
                sketch: SketchShape::for_error(ids, if inside(delta) { delta } else { 0.5 }),
                halve_every_sightings,
            }
        }
        Kind::Probability => {
            let p = section.required("p", 1.0f64);
            if !(0.0..=1.0).contains(&p) {
                section.fault("p", format!("must be from 0 to 1, is {p}"));
            }
            Admission::Probability { p }
        }
    };
    section.finish(Some(&format!("admission {}", kinds[kind as usize].0)));
    admission
}

fn eviction(mut section: Section<'_>) -> Eviction {
    #[derive(Clone, Copy)]
    enum Kind {
        Lru,
        Lfu,
        Age,
        None,
    }
    let kinds = [("lru", Kind::Lru), ("lfu", Kind::Lfu), ("age", Kind::Age), ("none", Kind::None)];
    let kind = section.choice("kind", &kinds);
    let eviction = match kind {
        Kind::Lru => Eviction::Lru,
        Kind::Lfu => Eviction::Lfu { halve_every_steps: section.or("halve_every", 0u64) },
        Kind::Age => Eviction::Age { steps: section.required_at_least_one("steps") as u64 },
        Kind::None => Eviction::None,
    };
    section.finish(Some(&format!("eviction {}", kinds[kind as usize].0)));
    eviction
}
