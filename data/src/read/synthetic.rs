//! `synthetic`: samples made as they are read, any of them a jump away.

use super::{FileReader, Unit};
use crate::batch::{BatchBuilder, Origin};
use crate::synthetic::{Draw, Teacher};
use crate::{Result, Schema, SyntheticSpec};

/// The only unit of a synthetic source.
pub(super) fn unit(schema: &Schema, settings: &SyntheticSpec) -> Result<Unit> {
    settings.validate(schema)?;
    let samples = settings.samples;
    let (schema, settings) = (schema.clone(), settings.clone());
    let open = move || -> Result<Box<dyn FileReader>> {
        Ok(Box::new(SyntheticReader {
            teacher: Teacher::new(&schema, &settings)?,
            draw: Draw::new(&schema),
            weighted: schema.features.iter().map(|feature| feature.weighted).collect(),
            next: settings.first_sample,
            end: settings.first_sample + settings.samples,
        }))
    };
    Ok(Unit { file: None, samples: Some(samples), open: Box::new(open) })
}

struct SyntheticReader {
    teacher: Teacher,
    draw: Draw,
    weighted: Vec<bool>,
    next: u64,
    end: u64,
}

impl FileReader for SyntheticReader {
    fn read(&mut self, samples: usize, file: u32, out: &mut BatchBuilder) -> Result<usize> {
        let take = (self.end - self.next).min(samples as u64);
        for _ in 0..take {
            self.teacher.draw(self.next, &mut self.draw);
            out.dense.extend_from_slice(&self.draw.dense);
            out.labels.push(self.draw.label);
            let bags = self.draw.bags.iter().zip(&self.weighted);
            for ((bag, weighted), builder) in bags.zip(&mut out.features) {
                for &(id, weight) in bag {
                    if *weighted {
                        builder.push_weighted(id, weight);
                    } else {
                        builder.push_id(id);
                    }
                }
                builder.end_bag();
            }
            out.origins.push(Origin { file, row: self.next });
            self.next += 1;
        }
        Ok(take as usize)
    }

    fn skip(&mut self, samples: u64) -> Result<u64> {
        let take = (self.end - self.next).min(samples);
        self.next += take;
        Ok(take)
    }

    fn bytes_read(&self) -> u64 {
        0
    }
}
