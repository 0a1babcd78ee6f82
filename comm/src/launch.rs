//! What a launcher tells a process of its place in a job.

use crate::{CommError, Result};

/// Who started the processes of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// Open MPI's mpirun.
    OpenMpi,
    /// A launcher with the PMI environment: MPICH's, Intel's.
    Pmi,
    /// Slurm's srun.
    Slurm,
    /// torchrun, or anything else that sets RANK and WORLD_SIZE.
    Torchrun,
}

/// A process's place in a job, from the launcher's environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchEnv {
    /// This process's number in the job, from 0.
    pub rank: usize,
    /// Processes in the job.
    pub size: usize,
    /// This process's number on its machine, from 0, if the launcher tells.
    pub local_rank: Option<usize>,
    /// Who set it.
    pub launcher: Launcher,
}

/// A launcher's variables.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
}

/// In the order in which they are asked: an MPI launcher inside a Slurm allocation sees Slurm's
/// variables too, and its own are the ones that count. Slurm sets SLURM_NTASKS and SLURM_PROCID for a
/// batch script, too, which is no process of a job: only SLURM_STEP_NUM_TASKS is srun's alone.
const LAUNCHERS: [Names; 4] = [
    Names {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    Names {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
    },
    Names {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        size: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
    },
    Names {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
    },
];

impl LaunchEnv {
    /// Reads the environment through `lookup` (such as `|name| std::env::var(name).ok()`). `None`
    /// when no launcher's rank and size are both there.
    ///
    /// Errors: [`CommError::Launch`] for a variable that is no number, a job of no processes, or a
    /// rank that is not in the job.
    pub fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        // An empty variable is one that somebody took back.
        let given = |name| lookup(name).filter(|text| !text.trim().is_empty());
        let number = |name: &'static str| {
            given(name)
                .map(|text| {
                    text.trim().parse::<usize>().map_err(|_| CommError::Launch {
                        reason: format!("{name}={text} is no number of a process"),
                    })
                })
                .transpose()
        };
        for names in &LAUNCHERS {
            // One of the two alone is somebody else's variable, whatever it says.
            if given(names.rank).is_none() || given(names.size).is_none() {
                continue;
            }
            let (Some(rank), Some(size)) = (number(names.rank)?, number(names.size)?) else {
                continue;
            };
            if rank >= size {
                return Err(CommError::Launch {
                    reason: format!(
                        "{}={rank} is no rank of {}={size} processes, which count from 0",
                        names.rank, names.size
                    ),
                });
            }
            let local_rank = number(names.local_rank)?;
            return Ok(Some(Self { rank, size, local_rank, launcher: names.launcher }));
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<LaunchEnv>> {
        LaunchEnv::read(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn place(rank: usize, size: usize, local: Option<usize>, launcher: Launcher) -> LaunchEnv {
        LaunchEnv { rank, size, local_rank: local, launcher }
    }

    #[test]
    fn every_launcher_is_known_by_its_variables() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[("HOME", "/"), ("RANK", "3")]), Ok(None));
        assert_eq!(read(&[("RANK", "gold")]), Ok(None));
        assert_eq!(read(&[("RANK", ""), ("WORLD_SIZE", "")]), Ok(None));
        let open_mpi = [
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ];
        assert_eq!(read(&open_mpi), Ok(Some(place(3, 4, Some(1), Launcher::OpenMpi))));
        let mpich = [("PMI_SIZE", "2"), ("PMI_RANK", "0"), ("MPI_LOCALRANKID", "0")];
        assert_eq!(read(&mpich), Ok(Some(place(0, 2, Some(0), Launcher::Pmi))));
        let slurm = [("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "7"), ("SLURM_LOCALID", "3")];
        assert_eq!(read(&slurm), Ok(Some(place(7, 8, Some(3), Launcher::Slurm))));
        let torchrun = [("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")];
        assert_eq!(read(&torchrun), Ok(Some(place(1, 2, Some(1), Launcher::Torchrun))));
    }

    #[test]
    fn the_innermost_launcher_counts() {
        let inside_slurm = [
            ("SLURM_NTASKS", "16"),
            ("SLURM_PROCID", "0"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_RANK", "1"),
        ];
        assert_eq!(read(&inside_slurm), Ok(Some(place(1, 2, None, Launcher::OpenMpi))));
        let batch_script = [("SLURM_NTASKS", "16"), ("SLURM_PROCID", "0")];
        assert_eq!(read(&batch_script), Ok(None));
    }

    #[test]
    fn contradictions_are_errors_that_name_the_variables() {
        for (variables, part) in [
            ([("RANK", "2"), ("WORLD_SIZE", "2")], "RANK=2 is no rank of WORLD_SIZE=2"),
            ([("RANK", "0"), ("WORLD_SIZE", "0")], "WORLD_SIZE=0"),
            ([("RANK", "-1"), ("WORLD_SIZE", "2")], "RANK=-1"),
            ([("PMI_RANK", "0"), ("PMI_SIZE", "many")], "PMI_SIZE=many"),
        ] {
            let error = read(&variables).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
